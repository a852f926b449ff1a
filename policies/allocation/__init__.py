"""CPUs and host memory by sensitivity: Synergy's demands and mechanisms."""
