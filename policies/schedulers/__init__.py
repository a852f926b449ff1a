"""One file per scheduling policy."""
