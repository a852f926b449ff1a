"""A real Slurm cluster of virtual nodes on one machine, for trying and testing Muri.

Only the standard library is used: the sandbox has to start before any virtual environment exists.
"""
