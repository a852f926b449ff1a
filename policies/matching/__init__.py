"""Which units to merge: maximum-weight matching, with a proven bound."""
