"""The command `muri-lab fault-runs`: many stories on twins, one after the other; a failing one is made small."""

import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import click

from muri.errors import UsageError
from muri_lab.twin.ordeal import Outcome, endure
from muri_lab.twin.shrink import smallest_failing
from muri_lab.twin.story import KINDS, Story, tell

_AT_ONCE: Final = 50  # Stories that a process tells before it reports
_MOST_TRIALS: Final = 150


@dataclass(frozen=True, slots=True)
class Broken:
    """A story in which an invariant does not hold."""

    seed: int  # Its seed
    why: str  # Which, of which job, and when


@dataclass(slots=True)
class Tally:
    """What came of many stories."""

    runs: int  # How many
    cycles: int  # Cycles of the controller in all
    injected: Counter[str]  # Faults by kind
    broken: list[Broken]  # Those in which an invariant did not hold

    def add(self, other: "Tally") -> None:
        """Add others."""
        self.runs += other.runs
        self.cycles += other.cycles
        self.injected.update(other.injected)
        self.broken += other.broken


def nothing() -> Tally:
    """No story yet."""
    return Tally(0, 0, Counter(), [])


def tell_some(seeds: range) -> Tally:
    """Tell the stories of some seeds."""
    tally = nothing()
    for seed in seeds:
        outcome = endure(tell(seed))
        broken = [Broken(seed, outcome.broken)] if outcome.broken else []
        tally.add(Tally(1, outcome.cycles, outcome.injected, broken))
    return tally


def tell_many(first: int, count: int, processes: int) -> Iterator[Tally]:
    """Tell the stories of many seeds, in the order of the seeds; gives what came of each part."""
    parts = [range(start, min(start + _AT_ONCE, first + count)) for start in range(first, first + count, _AT_ONCE)]
    if processes == 1:
        yield from map(tell_some, parts)
        return
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        yield from pool.map(tell_some, parts)


def smaller(story: Story) -> tuple[list[int], list[int], str]:
    """Return the numbers of the submissions and faults of a failing story that suffice, and what breaks then."""
    everything = [("submission", number) for number in range(len(story.submissions))]
    everything += [("fault", number) for number in range(len(story.faults))]

    def outcome(kept: Any) -> Outcome:
        return endure(story.only(*_split(kept)))

    found = smallest_failing(everything, lambda kept: bool(outcome(kept).broken), _MOST_TRIALS)
    return (*_split(found), outcome(found).broken)


def _split(kept: Any) -> tuple[list[int], list[int]]:
    submissions = [number for kind, number in kept if kind == "submission"]
    return submissions, [number for kind, number in kept if kind == "fault"]


def _numbers(text: str | None, count: int, option: str) -> list[int]:
    """Read numbers such as "0,2,3"; all of them where nothing is given."""
    if text is None:
        return list(range(count))
    words = [word for word in text.split(",") if word]
    if not all(word.isdigit() and int(word) < count for word in words):
        raise UsageError(f"{option} {text!r}: give numbers from 0 to {count - 1} with commas between them")
    return [int(word) for word in words]


def _replay(seed: int, submissions: str | None, faults: str | None) -> int:
    """Tell one story aloud."""
    story = tell(seed)
    chosen = story.only(
        _numbers(submissions, len(story.submissions), "--submissions"), _numbers(faults, len(story.faults), "--faults")
    )
    _describe(chosen)
    outcome = endure(chosen, click.echo)
    click.echo(f"BROKEN: {outcome.broken}" if outcome.broken else "every invariant holds")
    return int(bool(outcome.broken))


def _describe(story: Story) -> None:
    site = story.site
    click.echo(
        f"seed {story.seed}: {len(site.nodes)} node(s) of {site.nodes[0].gpu_count} GPU(s), policy "
        f"{story.config['policy']}, gate {site.conf.gate}, {len(story.submissions)} jobs, {len(story.faults)} faults"
    )
    for fault in story.faults:
        click.echo(f"  {fault}")


def _tell_failure(broken: Broken) -> None:
    """Make a failing story small and print it, with the command that replays it."""
    click.echo(f"seed {broken.seed}, made smaller:", err=True)
    story = tell(broken.seed)
    submissions, faults, why = smaller(story)
    click.echo(
        f"  {len(submissions)} of {len(story.submissions)} jobs and {len(faults)} of {len(story.faults)} "
        f"faults suffice: {why}",
        err=True,
    )
    for number in faults:
        click.echo(f"    {story.faults[number]}", err=True)
    click.echo(
        f"  replay: muri-lab fault-runs --replay {broken.seed} --submissions {','.join(map(str, submissions))} "
        f"--faults {','.join(map(str, faults))}",
        err=True,
    )


def _commit() -> str:
    """The commit of the checkout that this is run from, "" where there is none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _document(tally: Tally, commit: str, first: int, seconds: float, processes: int) -> dict[str, Any]:
    return {
        "commit": commit,
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "processes": processes},
        "first_seed": first,
        "runs": tally.runs,
        "seconds": round(seconds, 1),
        "cycles": tally.cycles,
        "faults": {kind: tally.injected[kind] for kind in KINDS},
        "faults_in_all": tally.injected.total(),
        "broken": [asdict(each) for each in tally.broken],
    }


def _keep(out: Path | None, document: dict[str, Any]) -> None:
    """Write the result so far, so that a run which is ended early is not lost."""
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", metavar="N", type=click.IntRange(min=1), default=2000, show_default=True, help="Stories.")
@click.option("--seed", metavar="S", type=click.IntRange(min=0), default=1, show_default=True, help="The first seed.")
@click.option("--jobs", "processes", metavar="N", type=click.IntRange(min=1), default=1, show_default=True,
              help="Processes.")  # fmt: skip
@click.option("--replay", metavar="SEED", type=click.IntRange(min=0), help="Tell one story aloud.")
@click.option("--submissions", metavar="N[,N…]", help="With --replay: only these jobs of it.")
@click.option("--faults", metavar="N[,N…]", help="With --replay: only these faults of it.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON into a file.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def main(**given: Any) -> None:
    """Try the real controller on a virtual Slurm with faults, in virtual time.

    Each seed gives a workload and what goes wrong: a killed controller, calls that fail, nodes and slurmctld that go
    away, people who hold, cancel or change jobs, damaged files. Whatever happens, no job may be lost, run twice, be
    changed for good or wait without a reason. Exits with 1 where that does not hold, and tells the smallest story in
    which it does not.

    \b
    Examples:
      muri-lab fault-runs --runs 2000
      muri-lab fault-runs --runs 100000 --jobs 2 --out fault-runs.json
      muri-lab fault-runs --replay 748
      muri-lab fault-runs --replay 748 --submissions 0,1 --faults 2
    """
    if given["replay"] is not None:
        sys.exit(_replay(given["replay"], given["submissions"], given["faults"]))
    if given["submissions"] is not None or given["faults"] is not None:
        raise click.UsageError("--submissions and --faults are for --replay")
    seed, runs, processes, out = (given[name] for name in ("seed", "runs", "processes", "out"))
    tally, commit, began_s, told_s = nothing(), _commit(), time.monotonic(), time.monotonic()
    for part in tell_many(seed, runs, processes):
        tally.add(part)
        for broken in part.broken:
            click.echo(f"seed {broken.seed}: {broken.why}", err=True)
        if time.monotonic() - told_s > 10:
            told_s = time.monotonic()
            click.echo(f"{tally.runs} of {runs} stories, {len(tally.broken)} broken", err=True)
            _keep(out, _document(tally, commit, seed, told_s - began_s, processes))
    document = _document(tally, commit, seed, time.monotonic() - began_s, processes)
    _keep(out, document)
    if given["as_json"]:
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(f"{tally.runs} stories, {tally.injected.total()} faults, {tally.cycles} cycles: "
                   f"{len(tally.broken)} broken")  # fmt: skip
        for kind, count in sorted(tally.injected.items(), key=lambda item: (-item[1], item[0])):
            click.echo(f"  {count:8d}  {kind}")
    for broken in tally.broken[:3]:
        _tell_failure(broken)
    sys.exit(int(bool(tally.broken)))
