"""A CUDA device for a PyTorch without one: fake tensors on it, its streams and events, its memory by address."""
