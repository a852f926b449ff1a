"""Placement by predicted utilisation and memory: Horus."""
