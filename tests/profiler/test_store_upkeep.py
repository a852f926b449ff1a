"""Observations, stale marks, audit, older formats, ways of writing, and setting a damaged store aside."""

import contextlib
import sqlite3
from collections import namedtuple
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from profile_builders import OLD_MEASUREMENT, insert_old, make_profile

from muri.profiler import store_file
from muri.profiler.errors import CorruptStoreError, StoreError, StoreVersionError
from muri.profiler.records import ProfileDetail
from muri.profiler.store import OBSERVATIONS_PER_KEY, Author, Observation, ProfileStore
from muri.profiler.store_file import (
    existing_journal,
    file_system_of,
    is_network,
    journal_of,
    set_aside,
    set_aside_stores,
)

NOW = datetime(2026, 11, 21, 20, 30, tzinfo=UTC)
BOB = Author("bob", "2026-11-21T20:30:00+00:00", "edit")

FORMAT_1 = """
CREATE TABLE measurement (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    model TEXT NOT NULL, batch_size INTEGER NOT NULL, gpu_count INTEGER NOT NULL, gpu_type TEXT NOT NULL,
    load_s REAL NOT NULL, preprocess_s REAL NOT NULL, propagate_s REAL NOT NULL, synchronize_s REAL NOT NULL,
    iteration_s REAL NOT NULL, gpu_mem_gib REAL NOT NULL, iterations INTEGER NOT NULL,
    measured_at TEXT NOT NULL, source TEXT NOT NULL
);
CREATE INDEX measurement_key ON measurement (model, batch_size, gpu_count, gpu_type, id);
PRAGMA application_id = 0x4D555249;
PRAGMA user_version = 1;
"""
"""As stores of format 1 were made; written down here so that no later change of the migrations touches it."""


@pytest.fixture
def store(path):
    with ProfileStore(path) as opened:
        yield opened


def observation(number, job_id=7):
    held_gib = 1.5 if number % 2 else None
    return Observation(f"2026-11-21T20:00:{number % 60:02d}+00:00", job_id, number, (0.1, 0.2, 0.3, 0.0), held_gib)


def test_a_store_of_format_1_keeps_its_profiles_also_where_its_migration_breaks_off(path, monkeypatch):
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.executescript(FORMAT_1)
        for load_s in (0.1, 0.12):
            insert_old(old, "measurement", **OLD_MEASUREMENT | {"load_s": load_s})
    broken = (store_file.MIGRATIONS[0], (*store_file.MIGRATIONS[1], "CREATE TABLE measurement (x)"))
    monkeypatch.setattr(store_file, "MIGRATIONS", broken)
    with pytest.raises(StoreError, match="already exists"):
        ProfileStore(path)
    monkeypatch.undo()
    with pytest.raises(StoreVersionError, match=r"format 1.*Start the controller once"):
        ProfileStore(path, read_only=True)
    with ProfileStore(path) as store:
        assert store.history(make_profile().key) == (make_profile(), make_profile(load_s=0.1))
        store.put(make_profile(detail=ProfileDetail(confidence=0.9)))
        store.check()
    with ProfileStore(path, read_only=True) as store:
        assert store._version() == len(store_file.MIGRATIONS)
        assert len(store.history(make_profile().key)) == 3


def test_observations_are_kept_once_and_only_the_newest(store):
    key = make_profile().key
    for number in [*range(OBSERVATIONS_PER_KEY + 5), OBSERVATIONS_PER_KEY + 4]:
        store.observe(key, observation(number))
    kept = store.observations(key)
    assert [item.iterations for item in kept] == list(range(5, OBSERVATIONS_PER_KEY + 5))
    assert kept[0] == observation(5)
    store.observe(key, observation(OBSERVATIONS_PER_KEY + 4, job_id=8))  # another job may be as far
    assert len(store.observations(key)) == OBSERVATIONS_PER_KEY
    assert store.observations(make_profile("other").key) == ()


def test_a_fresh_measurement_takes_the_mark_off_and_an_estimate_does_not(store):
    profile = make_profile()
    store.put(profile)
    store.observe(profile.key, observation(1))
    assert store.mark_stale(profile.key, "slow disk", BOB)
    assert not store.mark_stale(profile.key, "again", BOB)
    store.put(replace(profile, source="scaled"))
    (mark,) = store.stale_marks()
    assert (mark.key, mark.reason, mark.who) == (profile.key, "slow disk", "bob")
    assert store.get(profile.key) is not None  # it serves meanwhile
    store.put(profile)
    assert store.stale_marks() == ()
    assert store.observations(profile.key) == ()


def test_what_people_change_is_written_down_with_the_change_or_not_at_all(store):
    old, new = make_profile(load_s=0.1), make_profile(load_s=0.2, source="edit")
    store.put(old)  # a measurement is not a change by hand
    store.put_all((new,), BOB)
    store.remove(new.key, Author("root", BOB.at, "rm"))
    edit, removal = store.audit()
    assert (edit.who, edit.at, edit.action, edit.key) == ("bob", BOB.at, "edit", old.key)
    assert (edit.before["load_s"], edit.after["load_s"], edit.after["source"]) == (0.1, 0.2, "edit")
    assert (removal.who, removal.action, removal.before["load_s"], removal.after) == ("root", "rm", 0.2, None)
    assert store.history(old.key) == ()

    def broken():
        yield make_profile("first")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.put_all(broken(), BOB)
    assert (len(store.audit()), store.list()) == (2, ())
    store.put(old)  # the lock was given back


def test_what_is_set_aside_can_still_be_read_with_its_log(path):
    with ProfileStore(path) as store:
        store.put(make_profile())
        place = set_aside(path, NOW)  # while its log holds what is not in the file yet
        assert place.name == "profiles.db.damaged-20261121T203000Z"
        assert not any(path.parent.glob("profiles.db-*"))
    with ProfileStore(path) as fresh:
        assert fresh.list() == ()
    with ProfileStore(place, read_only=True) as kept:
        assert kept.list() == (make_profile(),)
    assert set_aside(path, NOW).name == "profiles.db.damaged-20261121T203000Z.2"
    assert set_aside_stores(path) == (place, place.with_name(place.name + ".2"))


def test_a_damaged_index_is_found_by_the_check(path):
    with ProfileStore(path) as store:
        store.put_all(make_profile(f"model-{number}") for number in range(300))
        root = store._rows("SELECT rootpage FROM sqlite_master WHERE name = 'measurement_key'")[0][0]
    content = bytearray(path.read_bytes())
    start = 4096 * (root - 1)
    content[start + 100 : start + 4096] = bytes(3996)
    path.write_bytes(content)
    with ProfileStore(path, read_only=True) as store, pytest.raises(CorruptStoreError, match="is damaged"):
        store.check()


def journal_in_force(store):
    return store._rows("PRAGMA journal_mode")[0][0], store._rows("PRAGMA synchronous")[0][0]


@pytest.mark.parametrize(("forced", "synchronous"), [("wal", 1), ("delete", 2)])
def test_the_way_of_writing_can_be_forced(path, monkeypatch, forced, synchronous):
    monkeypatch.setenv("MURI_STORE_JOURNAL", forced)
    with ProfileStore(path) as store:
        assert journal_in_force(store) == (forced, synchronous)
        store.put(make_profile())
        assert path.with_name("profiles.db-wal").exists() is (forced == "wal")
    assert existing_journal(path) == forced
    with ProfileStore(path, read_only=True) as store:
        assert store.list() == (make_profile(),)


Mount = namedtuple("Mount", "mountpoint fstype")


@pytest.fixture
def on_nfs(tmp_path, monkeypatch):
    """Let the folder look like a mount of NFS; the mount table is the only thing that is not real."""
    mounts = [Mount("/", "ext4"), Mount(str(tmp_path), "nfs4"), Mount(str(tmp_path / "scratch"), "xfs")]
    monkeypatch.setattr(store_file.psutil, "disk_partitions", lambda **_: mounts)
    return tmp_path


def test_a_network_file_system_gets_a_rollback_journal_and_full_synchronization(on_nfs):
    path = on_nfs / "state" / "profiles.db"
    with ProfileStore(path) as store:
        assert journal_in_force(store) == ("delete", 2)
        store.put(make_profile())
        assert [file.name for file in path.parent.iterdir()] == ["profiles.db"]
    with ProfileStore(on_nfs / "scratch" / "profiles.db") as store:
        assert journal_in_force(store) == ("wal", 1)


def test_a_store_with_a_rollback_journal_keeps_it_where_it_is_local(path, monkeypatch):
    with ProfileStore(path, journal="delete") as store:
        store.put(make_profile())
    assert journal_of(path) == "delete"  # an NFS server sees a local file system where its clients see NFS
    with ProfileStore(path) as store:
        assert journal_in_force(store) == ("delete", 2)


def test_a_store_that_moves_to_a_network_file_system_loses_its_log(path, on_nfs):
    with ProfileStore(path, journal="wal") as store:
        store.put(make_profile())
    with ProfileStore(path) as store:
        assert journal_in_force(store) == ("delete", 2)
        assert store.list() == (make_profile(),)


def test_the_file_system_is_that_of_the_nearest_mount():
    assert file_system_of(Path("/proc/self/no-such-thing")) == "proc"
    assert not is_network("ext4")
    assert all(map(is_network, ("nfs", "nfs4", "cifs", "lustre", "beegfs", "gpfs", "fuse.sshfs", "fuse", "ceph")))
