"""Predicts a model's resource needs from its graph, without running it (Horus)."""
