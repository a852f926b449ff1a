"""The means to resume: checkpoints on disk, which all ranks of a job have or none, and the loop's position.

Checkpoints are written under a temporary name, flushed, then renamed, so that a reader never sees a part. The ranks
save at the same iteration. The first `muri.batches` loop after `muri.checkpoint` is the training loop; each of its runs
is an epoch.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Tuple, TypeVar

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError, UsageError
from muri.text import json_of

DIRECTORY_VARIABLE: Final = "MURI_CHECKPOINT_DIR"
LOCK_TIMEOUT_S: Final = 60.0
"""How long a run waits for an earlier run of its job that may still write its last checkpoint."""

_FORMAT: Final = 1
_NAME: Final = re.compile(r"iteration-([0-9]{10,})")
_USER_PART: Final = "state"
_OWN_PART: Final = "muri.json"
_POLL_S: Final = 0.1


class CheckpointError(MuriError):
    """A checkpoint cannot be written, found or read."""


def default_place(environment: Mapping[str, str], cwd: Path, rank: int = 0, world_size: int = 1) -> Path:
    """$MURI_CHECKPOINT_DIR, else .muri/checkpoints/<job id> below the working directory; one folder for each rank."""
    named = environment.get(DIRECTORY_VARIABLE)
    place = Path(named) if named else Path(".muri/checkpoints", environment.get("SLURM_JOB_ID") or "local")
    return cwd / place / f"rank-{rank}" if world_size > 1 else cwd / place


class CheckpointStore:
    """The checkpoints of one job (of one rank of it), in a directory that is made if it is missing.

    Raises:
        CheckpointError: The directory cannot be made, or another process keeps it.
    """

    def __init__(self, place: Path, clock: Clock = MACHINE_CLOCK) -> None:
        self.place = place
        try:
            place.mkdir(parents=True, exist_ok=True)
            self._lock = os.fdopen(os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise CheckpointError(
                f"no checkpoints can be kept in {place}: {error.strerror}; set {DIRECTORY_VARIABLE} to a directory "
                "that this job can write and that outlives it"
            ) from error
        deadline_s = clock() + LOCK_TIMEOUT_S
        while not self._is_locked():
            if clock() > deadline_s:
                self.close()
                raise CheckpointError(
                    f"another process keeps its checkpoints in {place}; end it, or set {DIRECTORY_VARIABLE}"
                )
            clock.sleep(_POLL_S)

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # some network file systems lack locks: go on without one
            pass
        return True

    def close(self) -> None:
        """Let another process use the directory."""
        self._lock.close()

    def iterations(self) -> list[int]:
        """Return the iterations of the complete checkpoints, in ascending order."""
        matches = (_NAME.fullmatch(entry.name) for entry in self.place.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read(self, iteration: int) -> tuple[Path, Mapping[str, Any]]:
        """Return the file or directory that the script's own function wrote, and Muri's own part.

        Raises:
            CheckpointError: The checkpoint is damaged, or written by a newer Muri.
        """
        folder = self._folder(iteration)
        try:
            facts = json_of((folder / _OWN_PART).read_text(encoding="utf-8"))
            version = facts["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint {folder} cannot be read: {error}; nothing was deleted. Move it away to start anew"
            ) from error
        if version != _FORMAT:
            raise CheckpointError(
                f"the checkpoint {folder} has format {version}, this Muri reads {_FORMAT}; resume it with the Muri "
                "that wrote it, or move it away to start anew"
            )
        return folder / _USER_PART, facts

    def write(self, iteration: int, save: Callable[[Path], object], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint under a temporary name; `commit` makes it count.

        `save` writes the script's part to a path that does not exist yet; `facts` are Muri's part, plain JSON values.

        Raises:
            CheckpointError: `save` failed or wrote nothing, or the disk is full.
        """
        self._clear_drafts()
        draft = self.place / f".writing-{os.getpid()}-{time.monotonic_ns()}"
        try:
            draft.mkdir()
            save(draft / _USER_PART)
            _require_written(draft / _USER_PART)
            text = json.dumps({**facts, "format": _FORMAT, "iteration": iteration})
            (draft / _OWN_PART).write_text(text, encoding="utf-8")
            _flush_tree(draft)
        except Exception as error:
            _remove([draft])
            raise CheckpointError(_why_not_saved(iteration, error)) from error
        return draft

    def commit(self, draft: Path, iteration: int) -> None:
        """Give a written checkpoint its final name, which makes it the newest; raise CheckpointError on failure."""
        try:
            target = self._folder(iteration)
            if target.exists():  # the same iteration, from a run that had started anew
                target.rename(self.place / f".old-{os.getpid()}-{time.monotonic_ns()}")
            draft.rename(target)
            _flush_path(self.place)
        except OSError as error:
            raise CheckpointError(_why_not_saved(iteration, error)) from error

    def forget_before(self, iteration: int) -> None:
        """Remove older checkpoints, once a newer one is safe."""
        _remove(self._folder(older) for older in self.iterations() if older < iteration)
        self._clear_drafts()

    def _clear_drafts(self) -> None:
        for pattern in (".writing-*", ".old-*"):
            _remove(self.place.glob(pattern))

    def _folder(self, iteration: int) -> Path:
        return self.place / f"iteration-{iteration:010d}"


def _remove(folders: Iterable[Path]) -> None:
    import shutil  # takes time to load, which scripts without checkpoints save

    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _why_not_saved(iteration: int, error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        why = f"there is no space left ({error.strerror}); free some or set {DIRECTORY_VARIABLE}"
    else:
        why = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return f"no checkpoint of iteration {iteration} was written: {why}"


def _require_written(path: Path) -> None:
    if not path.exists():
        raise CheckpointError("the save function returned but wrote nothing to the path that it was given")


def _flush_tree(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for path in (*(Path(directory, name) for name in names), Path(directory)):
            if not path.is_symlink():
                _flush_path(path)


def _flush_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


CHECK_INTERVAL_S: Final = 0.5
"""Seconds between two votes of the ranks on saving; rank 0 converts them into a number of iterations."""


class OneRank:
    """How the ranks of a job decide together: here the only one alone. Each call is made by all, in the same order."""

    rank = 0
    world_size = 1

    def decide(self, stop: bool, due: bool, iteration_s: float | None) -> tuple[bool, bool]:
        """Return whether to stop and whether to save at this boundary, the same on every rank.

        One rank that was asked to `stop` is enough; of a periodic checkpoint that is `due` rank 0 decides.
        `iteration_s` is the recent time of an iteration, None when unknown.
        """
        return stop, due

    def all_true(self, mine: bool) -> bool:
        """Whether the value is true on every rank."""
        return mine

    def common(self, newest: int) -> int:
        """Return the newest iteration that every rank has, given this rank's newest; -1 stands for none."""
        return newest


class ManyRanks(OneRank):
    """Ranks that agree through a process group of their own (gloo: small numbers on the CPU)."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._group = distributed.new_group(backend="gloo")
        self.rank = distributed.get_rank()
        self.world_size = distributed.get_world_size()
        self._boundaries_left = 1

    def decide(self, stop: bool, due: bool, iteration_s: float | None) -> tuple[bool, bool]:
        """Ask the others every half second or so, counted in iterations so that all ask at the same boundary."""
        self._boundaries_left -= 1
        if self._boundaries_left > 0:
            return False, False
        first = self.rank == 0
        interval = max(1, int(CHECK_INTERVAL_S / iteration_s)) if first and iteration_s else 0
        stop_any, due_first, interval = self._largest(int(stop), int(due and first), interval)
        self._boundaries_left = max(1, interval)
        return bool(stop_any), bool(due_first)

    def all_true(self, mine: bool) -> bool:
        """True only if every rank says so."""
        return not self._largest(int(not mine))[0]

    def common(self, newest: int) -> int:
        """The smallest of the ranks' newest: no rank removes a checkpoint before all have a newer one."""
        return -self._largest(-newest)[0]

    def _largest(self, *values: int) -> list[int]:
        import torch  # a script with several ranks has imported it

        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._distributed.all_reduce(tensor, op=self._distributed.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]


def agreement() -> OneRank:
    """Return how this script's ranks agree.

    Raises:
        UsageError: The script has several ranks that are not connected yet.
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return ManyRanks(distributed) if distributed.get_world_size() > 1 else OneRank()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(
            f"this script has {size} ranks (WORLD_SIZE) that are not connected yet; call muri.checkpoint after "
            "torch.distributed.init_process_group, so that all ranks can save at the same iteration"
        )
    return OneRank()


Batch = TypeVar("Batch")

Site = Tuple[str, int]
"""File and line of a `muri.batches(…)`: tells the training loop from others."""


class LoaderPosition:
    """Epoch and batch of the training loop."""

    def __init__(self) -> None:
        self.epoch = 0  # runs of the training loop that have ended
        self.batch = 0  # batches done in the current run
        self._site: Site | None = None
        self._start: dict[str, Any] | None = None  # the generators' states where the current run began
        self._generators: list[Any] = []
        self._others: list[Site] = []  # loops under way but the training loop
        self._resume: Mapping[str, Any] | None = None

    @property
    def in_other_loop(self) -> bool:
        """Whether a loop other than the training loop is running; a script cannot resume from inside that."""
        return bool(self._others)

    def left(self) -> None:
        """Note that a loop was left with `break`."""
        if self._others:
            self._others.pop()

    def facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint keeps, with the generators' current states."""
        rng = capture_generators(self._generators)
        return {"epoch": self.epoch, "batch": self.batch, "epoch_start": self._start, "rng": rng}

    def resume_at(self, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's facts at the next run of the training loop."""
        self.epoch, self.batch = int(facts["epoch"]), int(facts["batch"])
        self._resume = facts
        restore_generators(facts["rng"])

    def begin(self, loader: Iterable[Batch], site: Site, skipped: Callable[[], None]) -> Iterator[Batch]:
        """Iterate over a loader; in a training loop that resumes, from its next batch.

        `site` is the script's call of `muri.batches`; `skipped` is called after each batch that is skipped.
        """
        if self._site is None:
            self._site = site
        if site != self._site:
            self._others.append(site)
            return self._until_its_end(iter(loader), site)
        self._others.clear()
        self._generators = generators_of(loader)
        facts, self._resume = self._resume, None
        if facts is not None and facts["epoch_start"] is not None:
            self._start = facts["epoch_start"]
            restore_generators(facts["epoch_start"], self._generators)
            source = iter(loader)
            for _ in range(self.batch):
                next(source, None)
                skipped()
            restore_generators(facts["rng"], self._generators)
            return source
        if self._start is not None:
            self.epoch += 1
        self.batch = 0
        self._start = capture_generators(self._generators)
        return iter(loader)

    def _until_its_end(self, source: Iterator[Batch], site: Site) -> Iterator[Batch]:
        yield from source
        if self._others and self._others[-1] == site:
            self._others.pop()


def capture_generators(generators: Iterable[Any] = ()) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and PyTorch's global generators and of given `torch.Generator`s.

    Only libraries that the script has imported are looked at.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss]}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    if torch is not None:
        state["torch"] = _text(torch.get_rng_state())
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [_text(own) for own in torch.cuda.get_rng_state_all()]
    state["generators"] = [_text(generator.get_state()) for generator in generators]
    return state


def restore_generators(state: Mapping[str, Any], generators: Iterable[Any] = ()) -> None:
    """Put the states back that `capture_generators` returned for the same generators, in the same order."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "numpy" in state:
        import numpy as np  # only if the script had imported it

        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "torch" in state:
        import torch  # only if the script had imported it

        torch.set_rng_state(_tensor(state["torch"]))
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all([_tensor(text) for text in state["cuda"]])
    for generator, text in zip(generators, state["generators"]):
        generator.set_state(_tensor(text))


def generators_of(loader: object) -> list[Any]:
    """The `torch.Generator` objects that a `DataLoader` shuffles with, each once."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    candidates = [getattr(holder, "generator", None) for holder in (loader, sampler, inner)]
    return list({id(one): one for one in candidates if isinstance(one, torch.Generator)}.values())


def _text(tensor: Any) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
