"""Coordinates the runtimes of a group whose members have several ranks: one runtime per rank, one network order."""
