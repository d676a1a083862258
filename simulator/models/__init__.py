"""The network to train: its shapes, and where they are read from."""
