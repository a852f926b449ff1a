"""Writers of one store that are killed at random."""

import pytest
from store_kills import Load, run

from muri.profiler import store_file

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
