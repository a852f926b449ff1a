"""The commands that administrators and users type."""
