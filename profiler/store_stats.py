"""What a store holds, in numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from muri.profiler.records import StageProfile
from muri.profiler.store import ProfileStore
from muri.profiler.store_connection import existing_journal, side_file
from muri.profiler.store_file import SIDE_FILES, set_aside_stores

REUSE_KIND: Final = "reuse"
REUSE_NAME: Final = "jobs"
REUSE_COUNT: Final = "count"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds.

    Attributes:
        path: The file.
        file_mib: Its size with its side files.
        journal: How it is written, "wal" or "delete".
        profiles: Keys that have a profile.
        models: Models among them.
        estimates: Profiles that are no measurement.
        stale: Profiles that are marked to be measured again.
        measurements: Kept measurements by source, older ones included.
        gpu_types: Profiles by GPU type.
        dry_runs_saved: Jobs that started with a profile that was measured for another one.
        oldest: When the oldest of the newest profiles was measured, "" when there is none.
        newest: When the newest was.
        changes_by_hand: Entries of the audit.
        damaged: Damaged stores that were set aside beside it.
    """

    path: str
    file_mib: float
    journal: str
    profiles: int
    models: int
    estimates: int
    stale: int
    measurements: dict[str, int]
    gpu_types: dict[str, int]
    dry_runs_saved: int
    oldest: str
    newest: str
    changes_by_hand: int
    damaged: tuple[str, ...]


def stats_of(store: ProfileStore) -> StoreStats:
    """Count what is in a store."""
    profiles = store.list()
    times = sorted(profile.measured_at for profile in profiles if profile.measured_at)
    return StoreStats(
        path=str(store.path),
        file_mib=round(_bytes(store) / 1024**2, 3),
        journal=existing_journal(store.path) or "",
        profiles=len(profiles),
        models=len({profile.key.model for profile in profiles}),
        estimates=sum(profile.is_estimate for profile in profiles),
        stale=len(store.stale_marks()),
        measurements=store.measurements(),
        gpu_types=_gpu_types(profiles),
        dry_runs_saved=reuse_count(store),
        oldest=times[0] if times else "",
        newest=times[-1] if times else "",
        changes_by_hand=len(store.audit()),
        damaged=tuple(str(path) for path in set_aside_stores(store.path)),
    )


def reuse_count(store: ProfileStore) -> int:
    """Jobs that the controller started with a profile that was measured for another one."""
    found = {document.name: document.body for document in store.documents(REUSE_KIND)}
    return int(found.get(REUSE_NAME, {}).get(REUSE_COUNT, 0))


def _gpu_types(profiles: Sequence[StageProfile]) -> dict[str, int]:
    return dict(sorted(Counter(profile.key.gpu_type for profile in profiles).items()))


def _bytes(store: ProfileStore) -> int:
    files = (store.path, *(side_file(store.path, end) for end in SIDE_FILES))
    return sum(file.stat().st_size for file in files if file.exists())
