"""Policies of sibling systems: Horus, SJF-BSBF and Synergy."""
