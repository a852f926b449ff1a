"""Scripts under the arbiter, each in a thread of the runtime or in a process of its own, and their shared GPU."""
