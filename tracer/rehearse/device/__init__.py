"""A CUDA device for a PyTorch without one: what PyTorch itself and libraries see of a GPU and of its host."""
