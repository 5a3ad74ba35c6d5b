"""Changes of kernels and their launches: precision, fusion, layouts, optimizers."""
