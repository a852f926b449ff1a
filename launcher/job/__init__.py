"""What every process of a job knows: its script, its environment, its scheduler, its stage clock and its sessions."""
