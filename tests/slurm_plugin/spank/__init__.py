"""Tests of the SPANK plugin: a package, so that other tests import their own conftest by name."""
