"""The API that scripts call: stages, batches, micro-batches and the dataset cache (checkpoints are in `checkpoints`)."""
