"""What every process of a job knows: its script, its environment, its scheduler, its stage clock, the session of a thread."""
