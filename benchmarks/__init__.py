"""Scripts that measure this project and its rivals, and the lab that measures training over a real network."""
