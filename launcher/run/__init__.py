"""The command `muri run`, in the job's own process."""
