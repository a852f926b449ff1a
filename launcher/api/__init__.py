"""What scripts call: stages, batches, micro-batches, the dataset cache (`muri.checkpoint` is in checkpoints)."""
