"""One planning cycle: line up, select, group, keep or regroup, place, explain."""
