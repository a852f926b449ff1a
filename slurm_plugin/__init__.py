"""All that speaks Slurm: SPANK plugin, job_submit snippet, gateway, planning, controller, commands."""
