"""The controller's process: its cycles, its status file, and the assembly of its parts."""
