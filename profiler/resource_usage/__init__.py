"""TODO: the duty of this room."""
