"""Why nothing can be predicted."""

from typing import Final

from muri.errors import MuriError

LEAST_PROFILES: Final = 40
LEAST_FAMILIES: Final = 8
"""With fewer the trees know less than the mean (docs/prediction.md)."""


class PredictionError(MuriError):
    """Nothing can be predicted."""


class TooFewProfilesError(PredictionError):
    """The store holds too little to learn from."""

    def __init__(self, profiles: int, families: int, gpu_type: str, gpu_count: int, others: tuple[str, ...]) -> None:
        has = f" The store has some of: {', '.join(others)}." if others else ""
        super().__init__(
            f"too little to learn from for {gpu_count} × {gpu_type}: {profiles} measured profiles with features, of "
            f"{families} model families; {LEAST_PROFILES} of {LEAST_FAMILIES} are needed.{has} "
            "Profile the zoo on such a node: python benchmarks/profile_zoo.py --store STORE"
        )


class LearnerMissingError(PredictionError):
    """scikit-learn is not installed."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"predictions need scikit-learn, which cannot be imported ({reason}): pip install 'muri[predict]'"
        )
