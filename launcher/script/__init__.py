"""What runs in a script's process: the calls of `import muri`, the hooks in PyTorch, checkpoints, measurements."""
