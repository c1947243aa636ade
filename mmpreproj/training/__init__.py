"""Training: configuration, loop, held-out loss, checkpoints."""
