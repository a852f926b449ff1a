"""Traces: Muri's own schema, importers for public traces and for a cluster's own accounting, a generator."""
