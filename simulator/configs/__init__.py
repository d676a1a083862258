"""Reads and writes the configurations of training tools: what people already have."""
