"""Runs scripts under the arbiter, each in a thread of the runtime or in its own process, on a shared GPU."""
