"""Decides from records alone what to repair, what to ask a policy, and what its answer means on Slurm. Pure."""
