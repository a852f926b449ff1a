"""Which units to merge: maximum-weight matching, with a proven bound."""

from muri.policies.matching.by_type import match_types
from muri.policies.matching.result import Matching, TypeMatching
from muri.policies.matching.solve import match_weights

__all__ = ["Matching", "TypeMatching", "match_types", "match_weights"]
