"""Saves and restores a script's state, so that it can stop at any iteration and resume later."""
