"""How long operators and kernels take under other conditions."""
