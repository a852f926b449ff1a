"""Tests of what a user types: the SPANK plugin and the job_submit module."""
