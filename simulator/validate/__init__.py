"""Predictions held against tables of measurements."""
