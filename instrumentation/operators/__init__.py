"""Measures the operators of a recording alone, in every form that a what-if asks about (docs/operators.md)."""
