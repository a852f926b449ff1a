"""Elastic GPU counts by goodput: Pollux, simplified."""
