"""Sub-batches: a batch of B samples runs as s micro-batches of B/s with the same gradient (docs/scripts.md)."""
