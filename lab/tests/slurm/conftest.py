"""The sandboxes of tests/slurm/sandboxes.py."""

from sandboxes import *  # noqa: F403
