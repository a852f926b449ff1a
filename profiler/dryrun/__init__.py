"""Turns what a dry run recorded into a profile: warm-up, attribution, confidence; also starts dry runs."""
