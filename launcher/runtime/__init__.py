"""The process that a group shares: takes members in, runs their scripts, reports."""
