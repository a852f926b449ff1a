"""Pure planning: efficiency, ordering, matching, priorities, placement, one class per policy."""
