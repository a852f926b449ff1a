"""What training scripts call: stages, batches, accumulation of gradients, the dataset cache (`muri.checkpoint` is in `checkpoints`)."""
