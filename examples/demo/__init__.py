"""The demo behind `make demo`: eight jobs on a real Slurm, with Muri and without."""
