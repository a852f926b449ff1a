"""What Slurm, its jobs' comments and the journal hold, as frozen records."""
