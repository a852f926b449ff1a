"""What runs on the node: the shared-process runtime, the stage API, the arbiter, `muri run`."""
