"""Predict a step: baseline, calibration, transforms and their composition."""
