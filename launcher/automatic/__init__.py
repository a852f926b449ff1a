"""Stages of scripts that mark none: hooks on what PyTorch does in every training loop."""
