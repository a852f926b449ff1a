"""The hybrid policy: each group interleaves, shares plainly or runs alone; CPUs and memory go where they gain most."""
