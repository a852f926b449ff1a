"""A damaged profile store must not stop the controller: it is set aside, loudly, and never emptied.

Only the controller does so by itself; a person is told how (`muri doctor`).
"""

import logging
from datetime import UTC, datetime
from pathlib import Path

from muri.profiler.errors import CorruptStoreError
from muri.profiler.store import ProfileStore
from muri.profiler.store_file import JournalMode, set_aside

log = logging.getLogger("muri.controller")


def open_profiles(path: Path, journal: JournalMode | None) -> ProfileStore:
    """Open the controller's store; one that is damaged is set aside and an empty one opened.

    Args:
        path: The store.
        journal: How to write it; None for the choice by file system.

    Raises:
        StoreError: It cannot be used for another reason, such as a newer format.
    """
    try:
        store = ProfileStore(path, journal=journal)
        try:
            store.check()
        except BaseException:
            store.close()
            raise
    except CorruptStoreError as error:
        log_set_aside(error, set_aside(path, datetime.now(UTC)))
        return ProfileStore(path, journal=journal)
    return store


def log_set_aside(error: CorruptStoreError, place: Path) -> None:
    """Say loudly what happened and what can be done."""
    log.error(
        "the profile store %s is damaged (%s): it was set aside as %s and an empty one begun, so models are "
        "measured again. To save what is left of it: sqlite3 %s .recover",
        error.path, error.detail, place, place,
    )  # fmt: skip
