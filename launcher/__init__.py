"""What runs on the node: the tops `api`, `run` and `runtime`, which do not import each other, and what they share."""
