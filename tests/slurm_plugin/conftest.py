"""A controller on a small Slurm in memory."""

from controller_fixtures import make_controller, status_dir, store  # noqa: F401 - fixtures
