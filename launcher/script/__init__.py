"""The script's own process: the calls of `import muri`, the hooks in PyTorch, checkpoints, measurements."""
