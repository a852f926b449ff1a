"""Records that the controller and the nodes share: what Slurm's comments and the journal say about a job."""
