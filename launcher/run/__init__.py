"""The command `muri run`, which executes in the job's own process."""
