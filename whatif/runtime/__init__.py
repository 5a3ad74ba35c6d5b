"""How work runs: loops compiled or as plain Python, and questions spread over processes and machines."""
