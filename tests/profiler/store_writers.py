"""What the writers of one store do, in a module that a new process imports quickly."""

from muri.profiler.records import ProfileKey, StageProfile
from muri.profiler.store import ProfileStore


def write(path, writer, count):
    """Store models of its own, and each time the one that all writers share."""
    with ProfileStore(path) as store:
        for number in range(count):
            for model in (f"model-{writer}-{number}", "shared"):
                key = ProfileKey(model, 64, 1, "gpu")
                store.put(StageProfile(key, float(writer), 0.1, 0.2, 0.0, writer + 0.3))
