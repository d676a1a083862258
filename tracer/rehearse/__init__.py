"""Runs a training script as chosen ranks of a world that is not there, and writes down what they would do."""
