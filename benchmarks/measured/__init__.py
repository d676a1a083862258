"""Tables of published measurements: what their words mean, and how far predictions are off."""
