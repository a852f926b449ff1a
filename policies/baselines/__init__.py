"""Policies to compare others with: papers take them as baselines, and they are rarely faster than FIFO."""
