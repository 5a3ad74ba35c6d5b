"""An example of a package that adds a what-if to whatif."""
