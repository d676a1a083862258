"""What is known of tensors: batches, tokens, checkpoints, numbers; where an unknown one ends a rehearsal."""
