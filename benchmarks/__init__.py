"""Scripts that measure this project and its rivals, and the campaign and the lab that measure real training."""
