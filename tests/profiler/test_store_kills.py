"""Writers of one store that are killed at random; benchmarks/store_kills.py is the same at full size."""

import pytest

from benchmarks.store_kills import Load, acknowledged, compare, run
from muri.profiler import store_file
from muri.profiler.store import ProfileStore

LOADS = {
    "wal": Load(writers=16, writes=30, kill_every_s=0.005, most_kills=30),
    "delete": Load(writers=16, writes=6, kill_every_s=0.02, most_kills=15),
}


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_killed_writers_lose_nothing_that_was_committed(tmp_path, journal, monkeypatch):
    monkeypatch.setattr(store_file, "BUSY_TIMEOUT_S", 600.0)  # how soon a lock comes depends on the machine
    load = LOADS[journal]
    outcome = run(tmp_path, journal, load)
    assert outcome.journal == journal
    assert outcome.kills > 0
    assert outcome.refused == 0
    assert outcome.acknowledged == load.writers * load.writes
    assert (outcome.lost, outcome.whole) == (0, True)


def test_a_lost_record_would_be_seen(tmp_path):
    """The check of the check: take one acknowledged record away, change another."""
    load = Load(writers=2, writes=10, most_kills=0)
    folder = tmp_path / "first"
    folder.mkdir()
    assert run(folder, "wal", load).lost == 0
    assert acknowledged(folder / "acknowledged-1") == list(range(10))
    with ProfileStore(folder / "profiles.db") as store:
        store.remove_document("kills", "writer-0-5")
        store._connection.execute("UPDATE measurement SET load_s = 9 WHERE model = 'writer-1-3'")
    assert compare(folder, folder / "profiles.db", load)[0] == 2
