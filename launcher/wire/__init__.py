"""Protocols between processes: `muri run` attaches to the runtime, a member's own process asks for resources."""
