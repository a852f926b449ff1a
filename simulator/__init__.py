"""The same policies driven by a trace and a virtual clock."""
