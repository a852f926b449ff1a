"""Carries out what was decided: every step asks something of Slurm and can be repeated."""
