"""The hybrid policy: each group interleaves, shares plainly or runs alone, and CPUs and memory go where they gain most."""
