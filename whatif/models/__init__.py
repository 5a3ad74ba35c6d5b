"""What optimizations have in common: the models that transform scripts are written with."""
