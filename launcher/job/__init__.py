"""What every process of a job knows: its script, environment, scheduler and stage clock, and the thread's session."""
