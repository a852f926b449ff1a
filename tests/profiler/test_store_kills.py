"""Whether the profile store loses anything when its writers are killed.

Processes write profiles and documents into one store. A random one at a time is killed with SIGKILL, wherever it is,
and started again; it goes on after the last write that it had acknowledged by a line in a file of its own, written
after the commit. Half of the writers open the store anew for every tenth write. At the end each acknowledged record
must be there with its figures, and SQLite must find the file whole.
"""

import multiprocessing
import os
import random
import signal
import time
from multiprocessing.connection import wait

import pytest

from muri.profiler import store_file
from muri.profiler.records import Document, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.profiler.store_file import existing_journal

START = "start"
"""A file that lets the writers begin: the first ones would be done before the last ones are forked."""

KIND = "kills"
WRITERS = 16


def record(writer, number):
    """The write of that number; its figures tell which one it is."""
    name = f"writer-{writer}-{number}"
    if number % 5 == 0:
        return Document(name, "2026-01-01T00:00:00Z", {"number": number, "padding": "x" * (number % 1500)})
    return StageProfile(ProfileKey(name, 8, 1, "gpu"), number / 8, 0.1, 0.1, 0.1, number / 8 + 1, iterations=number)


def write(path, journal, writer, writes):
    """Go on writing after the last acknowledged record, until all are written; begin when all writers are there."""
    while not (path.parent / START).exists():
        time.sleep(0.001)
    first = len(acknowledged(path, writer))
    handle = os.open(file_of(path, writer), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = ProfileStore(path, journal=journal)
    for number in range(first, writes):
        if writer % 2 and number % 10 == 0:
            store.close()
            store = ProfileStore(path, journal=journal)
        item = record(writer, number)
        if isinstance(item, Document):
            store.put_document(KIND, item)
        else:
            store.put(item)
        os.write(handle, b"%d\n" % number)
    store.close()


def file_of(path, writer):
    return path.parent / f"acknowledged-{writer}"


def acknowledged(path, writer):
    """The numbers in a writer's file."""
    file = file_of(path, writer)
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def write_and_kill(path, journal, writes, kill_every_s, most_kills):
    """Kill writers at random until they are done; returns the exit codes of those that did not end well."""
    chance = random.Random(20261121)
    fork = multiprocessing.get_context("fork")  # this process has no threads, and a fork starts in a millisecond
    codes = []

    def start(writer):
        process = fork.Process(target=write, args=(path, journal, writer, writes))
        process.start()
        return process

    running = {writer: start(writer) for writer in range(WRITERS)}
    (path.parent / START).touch()
    while running:
        if not wait([process.sentinel for process in running.values()], chance.expovariate(1 / kill_every_s)):
            if len(codes) < most_kills:
                running[chance.choice(sorted(running))].kill()
            continue
        for writer, process in list(running.items()):
            if process.exitcode is None:
                continue
            running.pop(writer)
            if process.exitcode:
                codes.append(process.exitcode)
                running[writer] = start(writer)
    return codes


@pytest.mark.parametrize(
    ("journal", "writes", "kill_every_s", "most_kills"), [("wal", 30, 0.005, 30), ("delete", 6, 0.02, 15)]
)
def test_killed_writers_lose_nothing_that_was_committed(
    tmp_path, monkeypatch, journal, writes, kill_every_s, most_kills
):
    monkeypatch.setattr(store_file, "BUSY_TIMEOUT_S", 600.0)  # how soon a lock comes depends on the machine
    path = tmp_path / "profiles.db"
    codes = write_and_kill(path, journal, writes, kill_every_s, most_kills)
    assert set(codes) == {-signal.SIGKILL}
    assert existing_journal(path) == journal
    with ProfileStore(path, read_only=True) as store:
        profiles = {profile.key.model: profile for profile in store.list()}
        documents = {document.name: document for document in store.documents(KIND)}
    for writer in range(WRITERS):
        numbers = acknowledged(path, writer)
        assert numbers == list(range(writes))
        for item in (record(writer, number) for number in numbers):
            assert (documents.get(item.name) if isinstance(item, Document) else profiles.get(item.key.model)) == item
    with ProfileStore(path) as store:
        store.check()
