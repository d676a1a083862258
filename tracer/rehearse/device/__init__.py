"""A CUDA device for a PyTorch without one: fake tensors on it, its streams, events and memory."""
