"""The twin: the real controller on a virtual Slurm, in virtual time."""
