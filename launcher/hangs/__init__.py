"""Finds processes and members that hang, and ends them with a clear cause (docs/sharing.md)."""
