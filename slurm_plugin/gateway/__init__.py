"""Talks to Slurm, in one of two ways behind one protocol."""
