"""The process that a group shares: it admits members, runs their scripts and reports their endings."""
