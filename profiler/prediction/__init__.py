"""What a model will need, told from its graph without running it (Horus).

Neither PyTorch nor scikit-learn is imported before it is needed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from muri.profiler.records import ProfileKey, StageProfile
    from muri.profiler.store import ProfileStore


def predict_profile(store: "ProfileStore", key: "ProfileKey") -> "StageProfile | None":
    """The predicted profile of a key, or None; see `muri.profiler.prediction.estimate.predict_profile`."""
    from muri.profiler.prediction import estimate  # noqa: PLC0415 -- loads NumPy

    return estimate.predict_profile(store, key)
