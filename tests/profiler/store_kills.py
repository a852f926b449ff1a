"""Whether the profile store loses anything when its writers are killed.

Processes write profiles and documents into one store. A random one at a time is killed with SIGKILL, wherever it
is, and started again; it goes on after the last write that it had acknowledged by a line in a file of its own,
written after the commit. Half of the writers open the store anew for every tenth write. At the end each acknowledged
record must be there with its figures, and SQLite must find the file whole.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from muri.profiler.errors import CorruptStoreError
from muri.profiler.records import Document, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.profiler.store_file import JournalMode, file_system_of

DOCUMENT_EVERY = 5
START = "start"
"""A file that lets the writers begin: the first ones would be done before the last ones are forked."""

REOPEN_EVERY = 10
KIND = "kills"


@dataclass(frozen=True, slots=True)
class Load:
    """How much is written and how often a writer is killed.

    Attributes:
        writers: Processes.
        writes: Of each.
        kill_every_s: Mean time between two kills.
        most_kills: After this many kills the writers finish undisturbed.
        seed: Of the kills.
    """

    writers: int = 32
    writes: int = 1000
    kill_every_s: float = 0.01
    most_kills: int = 1000
    seed: int = 20261121


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was left.

    Attributes:
        journal: How the store was written.
        file_system: What it was on.
        writers: Processes.
        writes: Of each.
        kills: Writers killed while they wrote.
        acknowledged: Writes whose commit had returned.
        lost: Acknowledged writes that are not in the store, or with other figures.
        unacknowledged: Kills between a commit and its acknowledgement: the record was written again.
        refused: Writers that ended with an error of their own, such as a lock that took too long.
        whole: Whether `PRAGMA integrity_check` found nothing.
        seconds: From the first write to the last.
    """

    journal: str
    file_system: str
    writers: int
    writes: int
    kills: int
    acknowledged: int
    lost: int
    unacknowledged: int
    refused: int
    whole: bool
    seconds: float


def record(writer: int, number: int) -> StageProfile | Document:
    """The write of that number; its figures tell which one it is."""
    name = f"writer-{writer}-{number}"
    if number % DOCUMENT_EVERY == 0:
        return Document(name, "2026-01-01T00:00:00Z", {"number": number, "padding": "x" * (number % 1500)})
    return StageProfile(ProfileKey(name, 8, 1, "gpu"), number / 8, 0.1, 0.1, 0.1, number / 8 + 1, iterations=number)


def write(path: Path, journal: JournalMode, acknowledgements: Path, writer: int, writes: int) -> None:
    """Go on writing after the last acknowledged record, until all are written; begin when all writers are there."""
    while not (path.parent / START).exists():
        time.sleep(0.001)
    done = acknowledged(acknowledgements)
    first = done[-1] + 1 if done else 0
    handle = os.open(acknowledgements, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = ProfileStore(path, journal=journal)
    for number in range(first, writes):
        if writer % 2 and number % REOPEN_EVERY == 0:
            store.close()
            store = ProfileStore(path, journal=journal)
        item = record(writer, number)
        if isinstance(item, Document):
            store.put_document(KIND, item)
        else:
            store.put(item)
        os.write(handle, b"%d\n" % number)
    store.close()


def acknowledged(path: Path) -> list[int]:
    """The numbers in a writer's file."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def run(folder: Path, journal: JournalMode, load: Load) -> Outcome:
    """Write and kill in an empty folder, then look at what is left."""
    path = folder / "profiles.db"
    begun_s = time.perf_counter()
    kills, refused = _write_and_kill(folder, path, journal, load)
    seconds = time.perf_counter() - begun_s
    missing, twice = compare(folder, path, load)
    return Outcome(
        journal=journal,
        file_system=file_system_of(path),
        writers=load.writers,
        writes=load.writes,
        kills=kills,
        acknowledged=sum(len(acknowledged(_file(folder, writer))) for writer in range(load.writers)),
        lost=missing,
        unacknowledged=twice,
        refused=refused,
        whole=_is_whole(path),
        seconds=round(seconds, 2),
    )


def _file(folder: Path, writer: int) -> Path:
    return folder / f"acknowledged-{writer}"


def _write_and_kill(folder: Path, path: Path, journal: JournalMode, load: Load) -> tuple[int, int]:
    chance = random.Random(load.seed)
    fork = multiprocessing.get_context("fork")  # this process has no threads, and a fork starts in a millisecond
    kills = refused = 0

    def start(writer: int) -> BaseProcess:
        process = fork.Process(target=write, args=(path, journal, _file(folder, writer), writer, load.writes))
        process.start()
        return process

    running = {writer: start(writer) for writer in range(load.writers)}
    (folder / START).touch()
    while running:
        if not wait([process.sentinel for process in running.values()], chance.expovariate(1 / load.kill_every_s)):
            if kills < load.most_kills:
                running[chance.choice(sorted(running))].kill()
            continue
        for writer, process in list(running.items()):
            if process.exitcode is None:
                continue
            kills += process.exitcode == -signal.SIGKILL
            refused += process.exitcode > 0
            running.pop(writer)
            if process.exitcode:
                running[writer] = start(writer)
    return kills, refused


def compare(folder: Path, path: Path, load: Load) -> tuple[int, int]:
    """Acknowledged records that are not there as they were written, and records that were written twice."""
    with ProfileStore(path, read_only=True) as store:
        profiles = {profile.key.model: profile for profile in store.list()}
        documents = {document.name: document for document in store.documents(KIND)}
        kept = sum(len(store.history(profile.key)) for profile in store.list())
    expected = list(_acknowledged_records(folder, load))
    lost = sum(
        (documents.get(item.name) if isinstance(item, Document) else profiles.get(item.key.model)) != item
        for item in expected
    )
    return lost, kept - len(profiles)


def _acknowledged_records(folder: Path, load: Load) -> Iterator[StageProfile | Document]:
    for writer in range(load.writers):
        for number in acknowledged(_file(folder, writer)):
            yield record(writer, number)


def _is_whole(path: Path) -> bool:
    try:
        with ProfileStore(path) as store:
            store.check()
    except CorruptStoreError:
        return False
    return True
