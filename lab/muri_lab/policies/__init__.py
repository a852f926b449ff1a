"""Policies to compare with, by the entry point group `muri.policies`."""
