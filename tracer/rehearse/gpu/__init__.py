"""The GPU that is not there: devices, streams, memory, and which tensors are on the host."""
