"""Figures and tables of papers as experiments: what is run, and ours beside the published figures."""
