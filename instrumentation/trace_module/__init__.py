"""Trace the operators of a training step from a module alone: meta tensors, no memory, no GPU (docs/predict.md)."""
