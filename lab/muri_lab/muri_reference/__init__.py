"""The semantics of the Muri paper's public simulator, to reproduce its published results."""
