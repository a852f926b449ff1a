"""The semantics of Synergy's public simulator, for comparison with its published results."""
