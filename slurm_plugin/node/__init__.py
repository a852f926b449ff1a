"""Runs on compute nodes, inside jobs: the pilot of a group, a dry run, a member's standing with Slurm."""
