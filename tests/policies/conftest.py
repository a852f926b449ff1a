"""Hypothesis draws the same examples here, whatever was imported before."""

from hypothesis.internal.conjecture import providers

# It also tries the numbers and texts that stand in the product's modules, but only of those that happen to be loaded:
# which other tests ran before in the same process would decide what a test is given.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
