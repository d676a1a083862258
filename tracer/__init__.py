"""Records the timeline of a real torch.distributed run. Importing it does not import torch."""
