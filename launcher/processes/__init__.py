"""Members that have a process of their own, under the same arbiter."""
