"""What runs on the node: `api`, `run` and `runtime`, which do not import each other, and the packages they share."""
