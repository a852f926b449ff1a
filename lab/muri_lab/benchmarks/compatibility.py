"""Whether scripts that were not written for Muri give under it the same results as alone.

Each script is run twice with plain Python, alone under `muri run`, and in groups of two to four. It is compared on
everything that the two plain runs have alike: losses with all digits, optimizer steps, exit code, files and output.
"""

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from muri.launcher.run.client import RuntimeLostError
from muri.profiler.records import STAGES, coverage, unexplained
from muri_lab.benchmarks.bars import describe_machine, tell
from muri_lab.benchmarks.compatibility_observation import (
    Observation,
    Repeatable,
    differences,
    observation_of,
    plainly_named,
    repeatable,
)
from muri_lab.benchmarks.compatibility_runs import HERE, LIMIT_S, Place, Workshop, draw_groups
from muri_lab.benchmarks.compatibility_scripts import SCRIPTS, TWINS, Script
from muri_lab.benchmarks.runtime_process import MURI_RUN, BenchmarkError

RESULT = HERE / "results" / "compatibility.json"
REQUIREMENTS = HERE / "compatibility_requirements.txt"
CACHE = Path.home() / ".cache" / "muri" / "compatibility"
ISOLATIONS = ("process", "thread")
PLAIN_TRIES = 3
ONLY_SLOW = frozenset({"interpreter"})
"""Dangers that make a script slow beside others in one process, and do not change its results."""


def scripts_python(cache: Path) -> Path:
    """The Python of the scripts: an environment for exactly these requirements."""
    recipe = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    return cache / f"venv-{recipe}" / "bin" / "python"


def set_up(cache: Path) -> None:
    """Make the scripts' environment: PyTorch and NumPy of this one, and the required packages."""
    python = scripts_python(cache)
    folder = python.parent.parent
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BenchmarkError("PyTorch is not installed here")
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True, symlinks=True)
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip())
    (site / "third-party.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--requirement", REQUIREMENTS], check=True)


class Store:
    """Stored observations, a file for each run; a stored run is not repeated."""

    def __init__(self, folder: Path, *, resume: bool) -> None:
        self._folder = folder
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str, stamp: str, make: Callable[[], dict[str, Observation]]) -> dict[str, Observation]:
        """Observations of the scripts of a run."""
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.exists():
            stored = json.loads(path.read_text())
            if stored["stamp"] == stamp:
                return {name: observation_of(values) for name, values in stored["found"].items()}
        found = make()
        values = {name: each.to_json() for name, each in found.items()}
        path.write_text(json.dumps({"key": key, "stamp": stamp, "found": values}))
        return found


@dataclass(frozen=True, slots=True)
class Plain:
    """The plain runs of a script."""

    script: Script  # The script
    observation: Observation  # Of its first run
    same: Repeatable  # What its second run has alike

    def compare(self, found: Observation) -> list[str]:
        """Return the differences of another run."""
        return differences(self.observation, found, self.same, ordered=self.script.processes == 1)


class Comparison:
    """All runs of some scripts."""

    def __init__(self, scripts: Sequence[Script], workshop: Workshop, store: Store, place: Place) -> None:
        self._scripts, self._workshop, self._store, self._place = scripts, workshop, store, place
        self._plain: dict[str, Plain] = {}

    def run(self, isolations: Iterable[str], rounds: int, seed: int, jobs: int) -> list[dict[str, Any]]:
        """Make the runs that are not stored, so many at once; a row for each script."""
        names = [script.name for script in self._scripts]
        with ThreadPoolExecutor(jobs) as pool:
            rows = dict(zip(names, pool.map(self._alone, self._scripts), strict=True))
            for script in self._scripts:  # one by one: without a core of its own an iteration is partly in no stage
                rows[script.name].update(self._dry_run(script))
            for isolation in isolations:
                if isolation == "thread":
                    names = [name for name in names if may_be_thread(rows[name]["dangers"])]
                drawn = draw_groups(names, rounds, seed) if len(names) > 1 else []
                twins = [pair for pair in TWINS if set(pair) <= set(names)]
                for groups in (*drawn, twins):
                    # No script is in two groups of a round.
                    for found in pool.map(partial(self._group, isolation), groups):
                        for name, run in found.items():
                            rows[name][isolation].append(run)
        return list(rows.values())

    def _alone(self, script: Script) -> dict[str, Any]:
        name = script.name
        self._workshop.prepare(script)
        (first, frozen), (second, frozen_too) = self._plain_run(script, "plain 1"), self._plain_run(script, "plain 2")
        same = repeatable(first, second, ordered=script.processes == 1)
        self._plain[name] = plain = Plain(script, first, same)
        different = plain.compare(self._run_alone(script, "muri run", (*MURI_RUN, "--no-attach")))
        varies = sorted(plainly_named(first.files).keys() - same.files)
        came_to = (
            f"exit code {first.exit_code}, {first.steps} steps, {first.loss_count} losses, {len(first.files)} files"
        )
        varies_too = f"{'' if same.losses else 'losses vary; '}out {same.out or 'varies'}, err {same.err or 'varies'}"
        tell("\n".join([f"{name}: {came_to}; {varies_too}", *(f"    muri run: {each}" for each in different)]))
        return {
            "name": name, "source": script.source, "version": self._workshop.version(script),
            "exit_code": first.exit_code, "steps": first.steps, "losses": first.loss_count,
            "files": len(first.files), "losses_repeat": same.losses, "files_vary": varies,
            "out_repeats": same.out, "err_repeats": same.err, "plain_frozen": frozen + frozen_too,
            "muri_run": different, **{isolation: [] for isolation in ISOLATIONS},
        }  # fmt: skip

    def _dry_run(self, script: Script) -> dict[str, Any]:
        """Return a dry run's stages and dangers to threads, or None and the reason."""
        path = self._place.cache / "runs" / f"dry run {script.name}.json"
        stamp = self._workshop.stamp(script)
        stored = json.loads(path.read_text()) if path.exists() else {}
        if stored.get("stamp") != stamp:
            stored = {"stamp": stamp, "found": self._workshop.dry_run(script)}
            path.write_text(json.dumps(stored))
        found = stored["found"]
        if "error" in found:
            tell(f"{script.name}: dry run: {found['error']}")
            return {"dangers": None, "stage_share": None, "iteration_s": None, "no_stage": found["error"]}
        stage_s, iteration_s = [found[f"{stage}_s"] for stage in STAGES], found["iteration_s"]
        share, dangers = coverage(stage_s, iteration_s), found["detail"].get("dangers")
        told = "dangers unknown" if dangers is None else ", ".join(dangers) or "no danger"
        in_stages = f"{share:.1%} of {iteration_s * 1e3:.3g} ms in stages"
        tell(f"{script.name}: dry run: {in_stages}; {told}; {found['stopped']}")
        return {
            "dangers": dangers, "stage_share": share, "iteration_s": iteration_s,
            "no_stage": unexplained(stage_s, iteration_s),
        }  # fmt: skip

    def _plain_run(self, script: Script, way: str) -> tuple[Observation, int]:
        """A run with plain Python, and how many did not end before it: PyTorch itself can freeze."""
        for frozen in range(PLAIN_TRIES):
            found = self._run_alone(script, way + " again" * frozen, (str(self._place.python),))
            if found.exit_code is not None:
                break
            tell(f"{script.name}: with plain Python it did not end within {LIMIT_S:.0f} s")
        return found, frozen

    def _run_alone(self, script: Script, way: str, prefix: Sequence[str]) -> Observation:
        def make() -> dict[str, Observation]:
            return {script.name: self._workshop.run_alone(script, prefix)}

        return self._store.get(f"{way} {script.name}", self._workshop.stamp(script), make)[script.name]

    def _group(self, isolation: str, group: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Of each script of a group its partners, whether it was let in, and what was different."""
        scripts = [self._plain[name].script for name in group]
        stamp = " ".join(map(self._workshop.stamp, scripts))
        key = f"{isolation} {' '.join(group)}"
        found = self._store.get(key, stamp, lambda: self._workshop.run_group(scripts, isolation))
        runs = {}
        for name in group:
            admitted = isolation != "thread" or found[name].exit_code != RuntimeLostError.exit_code
            different = self._plain[name].compare(found[name]) if admitted else []
            partners = [other for other in group if other != name]
            runs[name] = {"with": partners, "twins": group in TWINS, "admitted": admitted, "differences": different}
        told = [f"    {name}: {each}" for name, run in runs.items() for each in run["differences"]]
        tell("\n".join([f"{isolation}: {', '.join(group)}", *told]))
        return runs


def may_be_thread(dangers: Sequence[str] | None) -> bool:
    """Whether a script with these dangers runs as a thread here; None: they are not known."""
    return dangers is not None and ONLY_SLOW.issuperset(dangers)


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, list[int]]:
    """For each way, how many runs were the same as alone, of how many that it let in; twins are a way of their own."""
    rows = list(rows)
    found = {"muri run": [sum(not row["muri_run"] for row in rows), len(rows)]}
    for isolation in ISOLATIONS:
        for way, twins in ((isolation, False), (f"{isolation} twins", True)):
            runs = [run for row in rows for run in row[isolation] if run["admitted"] and run["twins"] == twins]
            found[way] = [sum(not run["differences"] for run in runs), len(runs)]
    return found


def chosen_scripts(names: Sequence[str]) -> list[Script]:
    """The scripts of these names, all when there are none."""
    known = {script.name: script for script in SCRIPTS}
    for name in names:
        if name not in known:
            raise click.UsageError(f"{name!r} is not a script; there are {', '.join(known)}")
    return [known[name] for name in names or known]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repositories",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with clones of the repositories, as FOLDER/owner/name.",
)
@click.option("--setup", "prepares", is_flag=True, help="First install the packages that the scripts need.")
@click.option("--scripts", "names", multiple=True, metavar="NAME", help="Only this one; may be repeated.")
@click.option(
    "--isolation",
    type=click.Choice([*ISOLATIONS, "both", "none"]),
    default="both",
    show_default=True,
    help="How the members of groups run; none: no groups.",
)
@click.option("--rounds", default=2, show_default=True, help="In how many groups each script runs.")
@click.option("--seed", default=1, show_default=True, help="Of the drawing of groups.")
@click.option("--jobs", default=1, show_default=True, help="How many runs are made at once; a group is one.")
@click.option("--cache", type=click.Path(path_type=Path), default=CACHE, help="Where all that it makes lies.")
@click.option("--resume", is_flag=True, help="Keep the runs of an earlier call that were made of the same.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--write", is_flag=True, help="Keep it in benchmarks/results/compatibility.json.")
def main(  # noqa: PLR0913 (click's options)
    *, repositories: Path | None, prepares: bool, names: tuple[str, ...], isolation: str, rounds: int, seed: int,
    jobs: int, cache: Path, resume: bool, as_json: bool, write: bool,
) -> None:  # fmt: skip
    """Compare training scripts under Muri with the same scripts alone; exit with 1 where a process's differ.

    \b
    Examples:
      python -m muri_lab.benchmarks.compatibility --setup
      python -m muri_lab.benchmarks.compatibility --repositories ~/clones --isolation process      about 40 minutes
      python -m muri_lab.benchmarks.compatibility --repositories ~/clones --resume --write
    """
    try:
        if prepares:
            set_up(cache)
        passed = True
        if repositories is not None:
            place = Place(repositories.absolute(), scripts_python(cache), cache.absolute())
            result = measure(
                place, chosen_scripts(names), isolation, rounds=rounds, seed=seed, jobs=jobs, resume=resume
            )
            passed = all(same == of for way, (same, of) in result["counts"].items() if "thread" not in way)
            if write:
                RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            if as_json:
                click.echo(json.dumps(result, indent=1, ensure_ascii=False))
    except BenchmarkError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if passed else 1)


def measure(
    place: Place, scripts: Sequence[Script], isolation: str, *, rounds: int, seed: int, jobs: int, resume: bool
) -> dict[str, Any]:
    """Run all of it; what was found."""
    if not place.python.exists():
        raise BenchmarkError(f"{place.python} is not there: call this with --setup once")
    comparison = Comparison(scripts, Workshop(place), Store(place.cache / "runs", resume=resume), place)
    isolations = {"both": ISOLATIONS, "none": ()}.get(isolation, (isolation,))
    rows = comparison.run(isolations, rounds, seed, jobs)
    found = counts(rows)
    for way, (same, of) in found.items():
        tell(f"{way}: {same} of {of} runs as alone")
    return {"machine": describe_machine(), "seed": seed, "rounds": rounds, "counts": found, "scripts": rows}


if __name__ == "__main__":
    main()
