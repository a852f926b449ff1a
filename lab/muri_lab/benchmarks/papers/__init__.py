"""Experiments of the five papers: one command each, our figures beside the published ones."""
