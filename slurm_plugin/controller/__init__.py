"""The controller's process: cycles, what it tells of them, and how its parts are put together."""
