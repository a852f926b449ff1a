"""Runs on the node: `run` and `runtime`, which do not import each other, scripts, and the packages that they share."""
