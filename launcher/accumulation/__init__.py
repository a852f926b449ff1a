"""Sub-batches of scripts that call nothing: a batch of B samples runs as s micro-batches of B/s (docs/sub-batches.md)."""
