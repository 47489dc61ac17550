"""DeepSpeed: batches, objective, optimizer, weight publishing, checkpoints."""
