"""Measures scripts (clock, dry runs, traces) and shows groups (`muri top`)."""
