"""The API that scripts call: stages, batches, micro-batches, the dataset cache (checkpoints are in `checkpoints`)."""
