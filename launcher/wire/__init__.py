"""What crosses processes: how `muri run` attaches to the runtime, and how a member's own process asks for resources."""
