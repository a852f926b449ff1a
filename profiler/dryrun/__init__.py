"""From what a dry run saw to a profile: warm-up, attribution, confidence. Pure."""
