"""Decides, from records alone: what to mend, what to ask a policy, and what its answer means on Slurm. Pure."""
