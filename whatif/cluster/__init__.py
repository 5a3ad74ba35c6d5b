"""Links between workers, and what it costs to exchange data over them."""
