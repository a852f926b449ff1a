"""The store on a real SQLite file: round trips, many writers, damage, missing permissions."""

import contextlib
import multiprocessing
import os
import shutil
import sqlite3
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import OLD_KEY, OLD_MEASUREMENT, insert_old, make_profile, profiles
from virtual_clock import VirtualClock

from muri.profiler import store as store_module
from muri.profiler.errors import (
    CorruptStoreError,
    StoreBusyError,
    StoreError,
    StoreOutdatedError,
    StorePermissionError,
    StoreVersionError,
)
from muri.profiler.records import ProfileKey
from muri.profiler.store import HISTORY_PER_KEY, Author, Observation, ProfileStore, Stored
from muri.profiler.store_file import APPLICATION_ID, MIGRATIONS

NOBODY = 65_534


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "profiles.db"


@pytest.fixture(scope="module")
def lasting_store(tmp_path_factory):
    """One store for all examples, since to make a file takes longer than anything else that they do."""
    with ProfileStore(tmp_path_factory.mktemp("state") / "profiles.db") as store:
        yield store


@given(stored=st.lists(profiles, max_size=8, unique_by=lambda profile: profile.key))
def test_what_is_stored_comes_back(lasting_store, stored):
    assert lasting_store.put_all(stored) == Stored(len(stored), 0)
    assert [lasting_store.get(profile.key) for profile in stored] == stored
    with ProfileStore(lasting_store.path, read_only=True) as again:
        assert again.list() == tuple(sorted(stored, key=lambda profile: profile.key))
    assert all(lasting_store.remove(profile.key) for profile in stored)


def test_history_does_not_grow_without_end(path):
    with ProfileStore(path) as store:
        other = make_profile("other")
        store.put(other)
        store.put_all(make_profile(load_s=float(number)) for number in range(HISTORY_PER_KEY + 5))
        loads = [profile.load_s for profile in store.history(make_profile().key)]
        assert loads == [float(number) for number in range(HISTORY_PER_KEY + 4, 4, -1)]
        assert store.get(other.key) == other


def test_a_user_who_names_ever_new_models_keeps_the_newest(path, monkeypatch):
    monkeypatch.setattr(store_module, "MOST_OF_A_USER", 3)
    with ProfileStore(path) as store:
        published, bobs = make_profile("m1", user=""), make_profile("m1", user="bob")
        store.put_all((published, bobs))
        for number in (1, 2, 3, 1, 4, 5):
            store.put(make_profile(f"m{number}", user="alice"))
        assert {each.key.model for each in store.list() if each.key.user == "alice"} == {"m1", "m4", "m5"}
        assert {published, bobs} <= set(store.list())


@pytest.mark.parametrize("reads", range(1, 4))
def test_a_store_that_another_process_makes_meanwhile_is_no_foreign_one(path, reads):
    class Interrupted(ProfileStore):
        done = 0

        def _rows(self, query, values=()):
            rows = super()._rows(query, values)
            self.done += 1
            if self.done == reads:
                ProfileStore(path).close()
            return rows

    with Interrupted(path) as store:
        assert store.done >= reads
        store.put(make_profile())
        assert store.list() == (make_profile(),)


@contextmanager
def locked_for(path, seconds, clock):
    """The store's lock, held by another process for some virtual seconds from now on."""
    others = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    others.execute("BEGIN IMMEDIATE")

    def give_back() -> None:
        clock.sleep(seconds)
        others.execute("ROLLBACK")

    clock.start(give_back)
    yield
    others.close()


def test_a_writer_waits_for_another_as_long_as_it_may_and_names_a_lock_that_is_held_for_longer(path):
    clock = VirtualClock()
    with ProfileStore(path, clock=clock) as store, locked_for(path, 29.0, clock):
        store.put(make_profile())
        assert 29.0 <= clock() < 29.01
    clock = VirtualClock()
    with ProfileStore(path, clock=clock) as store, locked_for(path, 31.0, clock):
        with pytest.raises(StoreBusyError, match="was locked by another process"):
            store.put(make_profile())
        assert 30.0 <= clock() < 30.01
        clock.sleep(1.0)
        store.put(make_profile())


def test_a_change_of_journal_waits_for_those_who_have_the_file_open(path):
    clock = VirtualClock()
    with ProfileStore(path, journal="wal"):
        with pytest.raises(StoreBusyError, match="was locked by another process"):
            ProfileStore(path, journal="delete", clock=clock)
        assert 30.0 <= clock() < 30.01


DAMAGED = r"is damaged .*Nothing was changed.*muri doctor .*--set-aside"
A_TEXT = "is a text file, no profile store: --store takes the database that"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x00not a database at all, but long enough" * 200, DAMAGED),
        (b"SQLite format 3\x00" + b"\xff" * 5000, DAMAGED),
        ("policy: fifo  # γ\n".encode(), A_TEXT),
        (b"{}", A_TEXT),
        (("γ" * 4095).encode(), A_TEXT),
    ],
    ids=["no header", "a header alone", "muri.yaml", "JSON", "a text cut within a character"],
)
@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_store_is_told_what_it_is_and_left_as_it_is(path, content, said, read_only):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(CorruptStoreError, match=said):
        ProfileStore(path, read_only=read_only).list()
    assert path.read_bytes() == content


def test_an_empty_file_is_told_to_be_one_and_no_old_format(path):
    path.parent.mkdir()
    path.touch()
    with pytest.raises(StoreVersionError, match=r"is an empty file\. The controller fills .* with --store"):
        ProfileStore(path, read_only=True)


@pytest.mark.parametrize("column", ["load_s", "iteration_s", "gpu_mem_gib", "iterations", "detail", "batch_size"])
@pytest.mark.parametrize("value", ["-1", "'fast'", "9e999", "1e300", "x'ff'"])
def test_a_row_that_cannot_be_true_costs_one_profile(path, caplog, column, value):
    with ProfileStore(path) as store:
        store.put_all([make_profile("odd"), make_profile("sane")])
        store._connection.execute(f"UPDATE measurement SET {column} = {value} WHERE model = 'odd'")
        for _ in range(2):
            assert [item.key.model for item in store.list()] == ["sane"]
        assert store.get(make_profile("odd").key) is None
        assert len(caplog.records) == 1
        assert "row 1 of table measurement is left out: " in caplog.text
        store.put(make_profile("odd"))
        assert {item.key.model for item in store.list()} >= {"sane"}


def test_an_observation_that_cannot_be_true_costs_one_observation(path, caplog):
    key = make_profile().key
    with ProfileStore(path) as store:
        for job_id in (1, 2, 3, 4):
            store.observe(key, Observation("2026-03-01T12:00:00Z", job_id, 10, (0.1,) * 4))
        store._connection.execute("UPDATE observation SET stage_s = '[1e300, 0, 0, 0]' WHERE job_id = 1")
        store._connection.execute("UPDATE observation SET stage_s = 'none' WHERE job_id = 2")
        store._connection.execute("UPDATE observation SET iterations = 9e18 WHERE job_id = 3")
        assert [item.job_id for item in store.observations(key)] == [4]
    assert caplog.text.count("of table observation is left out") == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:44] + b"\xc8" * 4052 + content[4096:],  # SQLite reads it, and refuses to write
        lambda content: content[:4096] + b"\xa5" * (len(content) - 4096),
    ],
    ids=["format", "middle"],
)
def test_damage_behind_a_sound_beginning_is_named_too(path, damage):
    with ProfileStore(path) as store:
        store.put_all(make_profile(f"model-{number}") for number in range(500))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CorruptStoreError, match="is damaged"), ProfileStore(path) as store:
        store.put(make_profile())
        store.list()


@pytest.mark.parametrize("read_only", [False, True])
def test_what_is_no_file_is_named_and_an_empty_file_becomes_a_store(tmp_path, read_only):
    (tmp_path / "empty").touch()
    with pytest.raises(StoreError, match="it is a directory; name a file in it"):
        ProfileStore(tmp_path, read_only=read_only)
    with pytest.raises(StoreError, match=r"cannot (read|write) the profile store|no profile store at"):
        ProfileStore(tmp_path / "empty" / "profiles.db", read_only=read_only)
    with ProfileStore(tmp_path / "empty") as store:
        store.put(make_profile())
        assert (store.list(), store.get(make_profile("other").key)) == ((make_profile(),), None)
        assert store.remove(make_profile("other").key) is False


@pytest.mark.parametrize(
    ("statement", "said"), [("PRAGMA user_version = 99", "format 99"), ("PRAGMA application_id = 1", "another program")]
)
def test_a_newer_format_and_another_programs_database_are_not_touched(path, statement, said):
    with ProfileStore(path) as store:
        store._connection.execute(statement)
    with pytest.raises(StoreVersionError, match=said):
        ProfileStore(path)


@pytest.fixture
def shared_folder():
    """A folder that other users may enter but not change, as /var/lib/muri."""
    folder = Path(tempfile.mkdtemp(prefix="muri-store-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(stat.S_IRWXU)
    shutil.rmtree(folder)


def _as_ordinary_user(action, results):
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    try:
        results.put(("result", action()))
    except StoreError as error:
        results.put((type(error).__name__, str(error)))


def _run_as_ordinary_user(folder, action, mode=0o555):
    """Run in a child without write permission; forked, as others may not read the interpreter's files."""
    folder.chmod(mode)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_as_ordinary_user, args=(action, results))
    child.start()
    outcome = results.get(timeout=240)
    child.join()
    return outcome


def _read_models(path):
    with ProfileStore(path, read_only=True) as store:
        return [profile.key.model for profile in store.list()]


def test_ordinary_users_may_read_while_the_controller_writes(shared_folder):
    path = shared_folder / "profiles.db"
    with ProfileStore(path) as store:
        store.put(make_profile())
        for side_file in shared_folder.iterdir():
            side_file.chmod(0o644 if os.geteuid() == 0 else 0o444)
        assert _run_as_ordinary_user(shared_folder, lambda: _read_models(path)) == ("result", ["resnet18"])


@pytest.mark.parametrize(
    ("folder_mode", "mode", "read_only", "said"),
    [
        (0o555, 0o444, True, ""),
        (0o555, 0o444, False, "no permission to write the profile store"),
        (0o555, None, False, "--store or MURI_PROFILES"),
        (0o555, 0o000, True, "no permission to read"),
        (0o000, 0o644, True, "no permission to"),
        (0o000, 0o644, False, "no permission to"),
    ],
)
def test_ordinary_users_may_read_and_are_told_what_they_may_not(shared_folder, folder_mode, mode, read_only, said):
    path = shared_folder / "profiles.db"
    if mode is None:
        path = shared_folder / "sub" / "profiles.db"
    else:
        with ProfileStore(path) as store:
            store.put(make_profile())
        path.chmod(mode)

    def act():
        with ProfileStore(path, read_only=read_only) as store:
            if not read_only:
                store.put(make_profile("intruder"))
            return [profile.key.model for profile in store.list()]

    kind, found = _run_as_ordinary_user(shared_folder, act, folder_mode)
    assert (kind, found) == ("result", ["resnet18"]) if not said else kind == "StorePermissionError" and said in found


def test_a_read_only_store_refuses_writes(path):
    with ProfileStore(path) as store:
        store.put(make_profile())
    with ProfileStore(path, read_only=True) as store:
        with pytest.raises(StorePermissionError):
            store.put(make_profile("other"))
        with pytest.raises(StorePermissionError):
            store.remove(make_profile().key)


@pytest.fixture
def of_format_2(path):
    """A store whose rows have no user."""
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in (each for version in MIGRATIONS[:2] for each in version):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("PRAGMA user_version = 2")
        insert_old(connection, "measurement", **OLD_MEASUREMENT, detail='{"cpu_cores": 2.0}')
        insert_old(connection, "stale", **OLD_KEY, since="since", reason="drifted", who="drift")
        seen = {"observed_at": "then", "job_id": 7, "iterations": 40, "stage_s": "[0.1, 0.1, 0.1, 0.1]"}
        insert_old(connection, "observation", **OLD_KEY, **seen)
        insert_old(connection, "audit", **OLD_KEY, at="then", who="root", action="edit", before="{}", after="{}")
        insert_old(connection, "document", kind="reuse", name="jobs", measured_at="then", body='{"count": 3}')
    return path


def test_what_an_older_version_stored_serves_all_users(of_format_2):
    path, key = of_format_2, ProfileKey("resnet18", 64, 1, "gpu")
    with pytest.raises(StoreOutdatedError, match="Start the controller once"):
        ProfileStore(path, read_only=True)
    with ProfileStore(path) as store:
        (found,) = store.list()
        assert (found.key, found.load_s, found.detail.cpu_cores) == (key, 0.12, 2.0)
        assert [(mark.key, mark.reason) for mark in store.stale_marks()] == [(key, "drifted")]
        assert [each.job_id for each in store.observations(key)] == [7]
        assert [(entry.key, entry.action) for entry in store.audit()] == [(key, "edit")]
        assert [each.body for each in store.documents("reuse")] == [{"count": 3}]
        store.check()
        store.put(make_profile(user="alice", load_s=0.5))
        assert [(item.key.user, item.load_s) for item in store.list()] == [("", 0.12), ("alice", 0.5)]
        assert [mark.key.user for mark in store.stale_marks()] == [""]
    with ProfileStore(path, read_only=True) as store:
        assert len(store.list()) == 2


def test_users_do_not_share_what_is_kept_of_a_key(path):
    alices, bobs = (make_profile(user=user).key for user in ("alice", "bob"))
    with ProfileStore(path) as store:
        store.put_all([make_profile(user="alice"), make_profile(user="bob")])
        author = Author("root", "2026-03-01T12:00:00Z", "stale")
        for key in (alices, bobs):
            store.observe(key, Observation("2026-03-01T12:00:00Z", 1, 10, (0.1,) * 4))
            assert store.mark_stale(key, "drifted", author)
        store.put(make_profile(user="alice", load_s=0.2))
        assert store.observations(alices) == ()
        assert len(store.observations(bobs)) == 1
        assert [mark.key for mark in store.stale_marks()] == [bobs]
        assert [len(store.history(key)) for key in (alices, bobs)] == [2, 1]
        assert store.remove(bobs)
        assert [item.key for item in store.list()] == [alices]
        assert (store.stale_marks(), store.observations(bobs)) == ((), ())
