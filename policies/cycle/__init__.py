"""One planning cycle: order the queue, select, group, keep or regroup, place, explain."""
