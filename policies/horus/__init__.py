"""Placement by predicted utilization and memory: Horus."""
