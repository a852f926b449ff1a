"""From the records of a dry run to a profile: warm-up, attribution, confidence; also starts dry runs."""
