"""What an operator costs: its kind, sizes, FLOPs and bytes."""
