"""The outcome of a script's run, and how two runs differ."""

import hashlib
import pickletools
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

_OF_JOB = (re.compile(r"lightning_logs/version_\d+"), "lightning_logs/version_JOB")
"""Lightning numbers its folders, in a Slurm job by the job id, which plain runs here have not."""

UNTOLD = (
    _OF_JOB,
    (re.compile(r"\d{4}-\d\d-\d\d[T_ -]\d\d[:-]?\d\d[:-]?\d\d([.,]\d+)?"), "DATE"),
    (re.compile(r"\d{8}[_-]\d{6}(-\w{8})?"), "DATE"),
    (re.compile(r"\b\d\d:\d\d:\d\d([.,]\d+)?"), "TIME"),
    (re.compile(r"\d[\d.]*±"), "TIME±"),
    (re.compile(r"[WIE]\d{4} \S+ +\d+ "), "LOG "),
    (re.compile(r"\?it/s"), "TIME"),
    (re.compile(r"\d+:\d\d<\S+|\d+:\d\d(:\d\d)?\b"), "TIME"),
    (re.compile(r"\d[\d.,]*(e[+-]?\d+)? ?"
                r"([KM]?it/s|s/it|ms/it|[MGk]?B/s|img/s|/s|s/step|[muµ]?s|secs?|seconds|hours|h)\b"), "TIME"),
    (re.compile(r"(?i)((?:time|runtime|per_second|elapsed|time/batch|ms/batch)\D{0,8})\d[\d.e+-]*"), r"\1TIME"),
    (re.compile(r"Time:? +[\d.]+ \([^)]*\)|Data:? +[\d.]+ \([^)]*\)|\([\d.]+s?, +[\d.]+/s\)"), "TIME"),
    (re.compile(r"(?i)\b(pid|process|ForkPoolWorker-|port|localhost:|127\.0\.0\.1:|127\.0\.1\.1:)[=: ]*\d+"), r"\1"),
    (re.compile(r"\[\d{3,}\]|<unknown>:\d+|0x[0-9a-f]+|tmp[a-z0-9_]{8}|torchelastic_\w+|run-\w+-\w{8}|\b\w{8}\.wandb"),
     "ID"),
    (re.compile(r"━+"), "BAR"),
    (re.compile(r"[\d.]+ ?(GB|MB|KB|GiB|MiB|G|M)\b"), "SIZE"),
)  # fmt: skip
"""Replaced by these words before lines are compared: times, dates, process ids, ports, memory, progress bars."""

UNTOLD_NAMES = (
    *UNTOLD[:3],
    (re.compile(r"tfevents\.\d+\.\S+?\.\d+\.(?=\d)"), "tfevents.HOST."),
    (re.compile(r"tmp[a-z0-9_]{8}|torchelastic_\w+|run-\w+-\w{8}|\b\w{8}\.wandb"), "ID"),
)
"""The same for names of files."""

_CACHES = frozenset({"__pycache__", ".inductor"})
_NUMBER = re.compile(r"[-+]?[\d.]+(e[-+]?\d+)?%?")


@dataclass(frozen=True, slots=True)
class Observation:
    """The compared parts of a run."""

    exit_code: int | None  # How it ended; None when it had to be ended after its time limit
    steps: int  # Steps of optimizers, in all of its processes
    losses: tuple[str, ...]  # a digest of all losses in order, of each process that trained; sorted
    loss_count: int  # Number of losses
    files: Mapping[str, str]  # Each file that it wrote or changed, and a digest of what is in it
    out: str  # Its standard output, as it is
    err: str  # Its standard error

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def observation_of(values: Mapping[str, Any]) -> Observation:
    """Make an observation of what `to_json` made."""
    plain = {each.name: values[each.name] for each in fields(Observation)}
    return Observation(**plain | {"losses": tuple(values["losses"])})


def observe(exit_code: int | None, log: Path, files: Mapping[str, str], out: Path, err: Path) -> Observation:
    """Read the log, files and output of a run."""
    steps, count, losses = 0, 0, []
    for path in log.iterdir():
        lines = path.read_text(encoding="utf-8").splitlines()
        own = [line for line in lines if line.startswith("loss ")]
        steps, count = steps + lines.count("step"), count + len(own)
        losses.append(hashlib.sha256("\n".join(own).encode()).hexdigest()[:16])
    streams = (path.read_bytes().decode(errors="replace") for path in (out, err))
    return Observation(exit_code, steps, tuple(sorted(losses)), count, files, *streams)


def told(text: str) -> Iterator[str]:
    """Lines of a stream as a terminal would show them in the end, without what no two runs have alike."""
    for line in text.split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2]
        for pattern, instead in UNTOLD:
            shown = pattern.sub(instead, shown)
        if shown := " ".join(shown.split()):  # columns move with the length of a time
            yield shown


def files_of(folder: Path) -> dict[str, str]:
    """Each file below a folder, and a digest of what is in it."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(folder)): digest(path) for path in paths if not _CACHES.intersection(path.parts)
    }  # fmt: skip


def written(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The files that a run added or changed."""
    return {name: content for name, content in after.items() if before.get(name) != content}


def plainly_named(files: Mapping[str, str]) -> dict[str, str]:
    """Files under names without dates, hosts and random parts; those of one such name together."""
    found: dict[str, list[str]] = {}
    for name, content in files.items():
        plain = name
        for pattern, instead in UNTOLD_NAMES:
            plain = pattern.sub(instead, plain)
        found.setdefault(plain, []).append(content)
    return {name: " ".join(sorted(contents)) for name, contents in found.items()}


def digest(path: Path) -> str:
    """Of a file; of a checkpoint, of its tensors and values, not of how the archive holds them."""
    whole = hashlib.sha256()
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(each for each in archive.namelist() if not each.endswith("serialization_id")):
                content = (_said if name.endswith("data.pkl") else bytes)(archive.read(name))
                whole.update(name.partition("/")[2].encode() + hashlib.sha256(content).digest())
    else:
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def _said(pickled: bytes) -> bytes:
    """A pickle with each text wherever it stands: whether two equal ones are one object hangs on what ran before."""
    said, memo, objects = list[object](), dict[object, object](), count()
    for operation, value, _ in pickletools.genops(pickled):
        if "PUT" in operation.name:
            memo[value] = said[-1] if isinstance(said[-1], str) else next(objects)
        else:
            plain = value if isinstance(value, str) else (operation.name, value)
            said.append(memo[value] if "GET" in operation.name else plain)
    return repr(said).encode()


@dataclass(frozen=True, slots=True)
class Repeatable:
    """What of a script two plain runs have alike, and so what its other runs are compared on."""

    losses: bool  # Whether both runs have the same losses, in all digits
    files: frozenset[str]  # Names of the files that have the same content in both runs
    out: str  # "all": both wrote the same lines; "words": the same but for numbers; "": different ones
    err: str  # Likewise, for standard error


def repeatable(one: Observation, other: Observation, *, ordered: bool) -> Repeatable:
    """Compare two plain runs."""
    files, others = plainly_named(one.files), plainly_named(other.files)
    alike = frozenset(name for name, content in files.items() if others.get(name) == content)
    return Repeatable(
        one.losses == other.losses, alike, _alike(one.out, other.out, ordered), _alike(one.err, other.err, ordered)
    )


def differences(plain: Observation, found: Observation, same: Repeatable, *, ordered: bool) -> list[str]:
    """Return the differences of a run in those parts that plain runs have alike."""
    different = [
        f"{name.replace('_', ' ')}: {getattr(plain, name)} alone, {getattr(found, name)} here"
        for name in ("exit_code", "steps", "loss_count")
        if getattr(plain, name) != getattr(found, name)
    ]
    if same.losses and plain.losses != found.losses:
        different.append("losses")
    different += _different_files(plainly_named(plain.files), plainly_named(found.files), same.files)
    for stream in ("out", "err"):
        how = getattr(same, stream)
        told_alone, told_here = (_form(getattr(each, stream), how, ordered) for each in (plain, found))
        if told_alone != told_here:
            different.append(f"{stream}: {_first_difference(told_alone, told_here)}")
    return different


def _different_files(plain: Mapping[str, str], found: Mapping[str, str], same: frozenset[str]) -> list[str]:
    missing, more = sorted(plain.keys() - found.keys()), sorted(found.keys() - plain.keys())
    changed = [name for name in sorted(same & found.keys()) if plain[name] != found[name]]
    return [
        *(f"file missing: {name}" for name in missing), *(f"file added: {name}" for name in more),
        *(f"file: {name}" for name in changed),
    ]  # fmt: skip


def _form(text: str, how: str, ordered: bool) -> tuple[str, ...]:
    """The lines of a stream as they are compared."""
    if not how:
        return ()
    lines = told(text)
    formed = lines if how == "all" else (_NUMBER.sub("#", line) for line in lines)
    return tuple(formed) if ordered else tuple(sorted(formed))


def _alike(one: str, other: str, ordered: bool) -> str:
    return next((how for how in ("all", "words") if _form(one, how, ordered) == _form(other, how, ordered)), "")


def _first_difference(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    length = min(len(one), len(other))
    index = next((index for index in range(length) if one[index] != other[index]), length)
    here, there = (lines[index][:160] if index < len(lines) else "nothing more" for lines in (one, other))
    return f"line {index + 1}: {here!r} alone, {there!r} here"
