"""What a model will need, told from its graph without running it (Horus)."""
