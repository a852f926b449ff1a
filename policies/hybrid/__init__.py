"""Interleaving, plain sharing or running alone, each group on its own, and CPUs and memory by what they gain."""
