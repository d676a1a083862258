"""What a rank holds: states and activations, at the worst moment and over time."""
