"""Decides which member gets a resource next: the disciplines, and the choice between them."""
