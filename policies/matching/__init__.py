"""Which units to merge: maximum-weight matching, with a proven bound."""

from muri.policies.matching.result import Matching
from muri.policies.matching.solve import match_weights

__all__ = ["Matching", "match_weights"]
