"""Predicted = measured? Workloads run on a sandbox, a real Slurm, and in the twin, and what each job took in both.

    python -m muri_lab.benchmarks.fidelity live --out DIR      # minutes for each workload
    python -m muri_lab.benchmarks.fidelity compare DIR --json > fidelity.json      # both are kept in results/

The twin is told what the live run was told: jobs, profiles, configuration. Besides, three phases that no configuration
tells are read off the live run: when slurmctld's second begins, when its backfill loop ticks, and when the controller
began a cycle. The delays of `SANDBOX` were measured on the sandbox once, by other runs.

Whether a job ends right before or after a cycle may be a matter of milliseconds, and moves all that follows by a
cycle. So a prediction is the mean of `TWINS` twins whose delays differ as those of a machine do, with their range. Of
a workload that ran live more than once, the mean of its runs is compared with the mean of their predictions.
"""

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from muri.profiler.records import ProfileKey, StageProfile
from muri.slurm_plugin.config import Config
from muri_lab.benchmarks.bars import describe_machine
from muri_lab.benchmarks.fidelity_live import INTERVAL_S, JobRun, Run, config_of, dump, load, mark_of, run_live
from muri_lab.benchmarks.fidelity_workloads import SANDBOX, USERS, VALIDATION, WORKLOADS, Workload, named, seeded
from muri_lab.twin.programs import Work
from muri_lab.twin.sharing import Iteration, Sharing
from muri_lab.twin.site import Site, SlurmConf, plain_nodes, shared_cpus
from muri_lab.twin.submission import Submission
from muri_lab.twin.twin import EPOCH_S, Twin, folder

TWINS: Final = 12

_VARIED: Final = {
    "submit_s": (0.7, 2.0), "read_s": (0.7, 2.0), "change_s": (0.7, 2.0), "new_job_s": (0.7, 1.6),
    "decide_s": (0.7, 2.0), "launch_s": (0.7, 1.5), "end_s": (0.7, 2.0), "run_s": (0.8, 1.3), "pilot_s": (0.9, 1.2),
    "join_s": (0.85, 1.2), "busy_s": (0.5, 1.5), "crowd_s": (0.5, 1.3), "crowd_alone_s": (0.5, 1.3),
    "leave_s": (0.7, 1.5),
}  # fmt: skip
"""Within what the delays of one twin lie, as multiples of `SANDBOX`."""

_HAND_OVER_S: Final = (0.0005, 0.002)
_CYCLE_S: Final = (-0.02, 0.04)  # How much earlier or later than noted a cycle of the live run may have begun
_CORES: Final = 2  # Of the machine on which the live runs were made
_SCRIPT_S: Final = 0.001  # Seconds of an iteration of the workloads' script beside its sleeps
_LEAVE_S: Final = 0.035  # From a member's last iteration to its batch script's end on a quiet machine, the median
_LEAD_S: Final = 20.0  # From the twin's beginning to the workload's
_UIDS: Final = {user: 1001 + number for number, user in enumerate(USERS)}
_EVERY: Final = tuple(workload.name for workload in (*WORKLOADS, *VALIDATION))


def predict(workload: Workload, live: Run, *, with_muri: bool = True, slowness: float = 1.0) -> tuple[Run, ...]:
    """Run a workload in twins, with the phases of a live run."""
    draws = [seeded(f"{workload.name} {number}") for number in range(TWINS)]
    return tuple(_run_twin(workload, live, draw, with_muri=with_muri, slowness=slowness) for draw in draws)


def slowness_of(live: Run) -> float:
    """Return how many times slower than a quiet machine a live run was, by the time its members took to leave."""
    leaves_s = [job.end_s - job.trained_s for job in live.jobs if job.member]
    return max(1.0, statistics.median(leaves_s) / _LEAVE_S) if leaves_s else 1.0


def _run_twin(workload: Workload, live: Run, draw: random.Random, *, with_muri: bool, slowness: float) -> Run:
    scales = {name: slowness * draw.uniform(*span) for name, span in _VARIED.items()}
    delays = replace(SANDBOX, **{name: getattr(SANDBOX, name) * scale for name, scale in scales.items()})
    second_s = live.start_s % 1.0
    begin_s = EPOCH_S + _LEAD_S + second_s
    conf = SlurmConf(
        bf_interval_s=1.0, bf_at_s=backfill_phase_s(live), cred_expire_s=10.0, min_job_age_s=7200.0, kill_wait_s=5.0,
        def_mem_per_cpu_mib=1000,
    )  # fmt: skip
    site = Site(
        plain_nodes(workload.node_count, workload.gpus_per_node, 64, 64_000),
        shared_cpus(),
        conf,
        delays=delays,
        visible_cpus=_CORES,
    )
    sharing = Sharing(piece_s=0.02, hand_over_s=draw.uniform(*_HAND_OVER_S), contention=False, has_gpu=False)
    with folder() as place:
        config = Config(**config_of(workload))
        twin = Twin(site, config, place, sharing)
        twin.know([] if workload.is_cold else _profiles(workload))
        twin.submit(_submissions(workload, begin_s, with_muri=with_muri))
        cycle_s = live.cycle_s - (live.start_s - second_s) + draw.uniform(*_CYCLE_S)
        if with_muri:
            twin.run(first_cycle_s=(cycle_s - delays.read_s / 2) % INTERVAL_S, on_events=config.events.enabled)
        else:
            twin.run_without_controller()
    return _run_of(twin, workload, live, begin_s)


def backfill_phase_s(live: Run) -> float:
    """When slurmctld's backfill loop ticked within a second: then, or with a second's beginning, jobs start."""
    starts = [(job.start_s + live.start_s - SANDBOX.launch_s) % 1.0 for job in live.jobs]
    apart = [start for start in starts if 0.06 < start < 0.985]
    return statistics.median_low(apart) if apart else 0.5


def _profiles(workload: Workload) -> list[StageProfile]:
    counts = sorted({job.gpu_count for job in workload.jobs})
    return [
        StageProfile(ProfileKey(model, 8, count, "gpu"), *stages, iteration_s=sum(stages), iterations=20)
        for model, stages in workload.models.items()
        for count in counts
    ]


def _submissions(workload: Workload, begin_s: float, *, with_muri: bool) -> list[Submission]:
    found = []
    for job in workload.jobs:
        stages = workload.models[job.model]
        work = Work(Iteration(stages, sum(stages) + _SCRIPT_S), job.iterations)
        mark = mark_of(job, workload, unit="") if with_muri else ""
        found.append(
            Submission(
                begin_s + job.submit_s, job.user, _UIDS[job.user], work, mark, node_count=job.node_count,
                gpus_per_node=job.gpus_per_node, time_limit_s=600,
            )
        )  # fmt: skip
    return found


def _run_of(twin: Twin, workload: Workload, live: Run, begin_s: float) -> Run:
    jobs = tuple(
        JobRun(
            job.submit_s, course.starts_s[-1] - begin_s, course.trained_s[0] - begin_s, course.trained_s[1] - begin_s,
            course.end_s - begin_s, bool(course.pilots), len(course.starts_s),
        )
        for job, course in zip(workload.jobs, twin.courses, strict=True)
    )  # fmt: skip
    groups: dict[int, list[int]] = {}
    for number, course in enumerate(twin.courses):
        for pilot in course.pilots:
            groups.setdefault(pilot, []).append(number)
    return Run(jobs, tuple(tuple(group) for _, group in sorted(groups.items())), live.start_s, live.cycle_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload live and in twins."""

    workload: str  # Its name
    lives: tuple[Run, ...]  # Its live runs
    twins: tuple[Run, ...]  # The twins of all of them

    def measured(self, figure: str) -> tuple[float, float, float]:
        """The mean of a figure over the live runs, its least and its most."""
        return _mean_least_most(self.lives, figure)

    def predicted(self, figure: str) -> tuple[float, float, float]:
        """The mean of a figure over the twins, its least and its most."""
        return _mean_least_most(self.twins, figure)

    def error(self, figure: str) -> float:
        """How far the prediction of a figure is from the live one, relative to that."""
        return self.predicted(figure)[0] / self.measured(figure)[0] - 1

    def row(self) -> dict[str, Any]:
        """As plain values."""
        errors = {f"{name}_error": round(self.error(name), 4) for name in ("average_jct_s", "p99_jct_s", "makespan_s")}
        off = statistics.median(
            abs(mine / theirs - 1) for mine, theirs in zip(_jcts_s(self.twins), _jcts_s(self.lives), strict=True)
        )
        names = _figures(self.lives[0])
        return {
            "workload": self.workload, "jobs": len(self.lives[0].jobs), "live_runs": len(self.lives),
            "live_mean_least_most": {name: [round(each, 2) for each in self.measured(name)] for name in names},
            "mean_least_most": {name: [round(each, 2) for each in self.predicted(name)] for name in names},
            **errors, "median_job_error": round(off, 4),
        }  # fmt: skip


def _mean_least_most(runs: Sequence[Run], figure: str) -> tuple[float, float, float]:
    found = [_figures(run)[figure] for run in runs]
    return statistics.fmean(found), min(found), max(found)


def _jcts_s(runs: Sequence[Run]) -> list[float]:
    """Each job's JCT, the mean over some runs."""
    return [statistics.fmean(job.jct_s for job in same) for same in zip(*(run.jobs for run in runs), strict=True)]


def _figures(run: Run) -> dict[str, float]:
    ordered = sorted(job.jct_s for job in run.jobs)
    return {
        "average_jct_s": round(run.average_jct_s, 2),
        "p99_jct_s": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "makespan_s": round(run.makespan_s, 2),
        "groups": len(run.groups),
        "members": sum(job.member for job in run.jobs),
    }


def compare_all(folder_of_runs: Path, names: Sequence[str]) -> list[Comparison]:
    """Run in twins what ran live."""
    found = []
    drawn = sorted({path.name.partition(".")[0] for path in folder_of_runs.glob("drawn-*.json")})
    for workload in chosen(names or (*_EVERY, *drawn)):
        if paths := sorted(folder_of_runs.glob(f"{workload.name}.*json")):
            click.echo(f"{workload.name} …", err=True)
            lives = tuple(load(json.loads(path.read_text())) for path in paths)
            twins = tuple(twin for live in lives for twin in predict(workload, live))
            found.append(Comparison(workload.name, lives, twins))
    return found


def _table(comparisons: Sequence[Comparison]) -> str:
    lines = [f"{'':15} average JCT (s)                  makespan (s)",
             f"{'workload':15}  live  twin (range)       error   live  twin (range)        error"]  # fmt: skip
    for each in comparisons:
        cells = [f"{each.workload:15}"]
        for figure in ("average_jct_s", "makespan_s"):
            mean, least, most = each.predicted(figure)
            spread = f"({least:.1f}–{most:.1f})"
            cells.append(f"{each.measured(figure)[0]:5.1f} {mean:5.1f} {spread:13} {each.error(figure):+5.1%}")
        lines.append(" ".join(cells))
    for figure in ("average_jct_s", "makespan_s"):
        errors = [abs(each.error(figure)) for each in comparisons]
        lines.append(f"{figure}: |error| mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


def chosen(names: Sequence[str]) -> list[Workload]:
    """Return the workloads of some names."""
    found = {name: named(name) for name in names}
    if unknown := sorted(name for name, workload in found.items() if workload is None):
        raise click.UsageError(f"unknown: {', '.join(unknown)}; there are {', '.join(_EVERY)}, and drawn-N for each N")
    return [workload for workload in found.values() if workload is not None]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Compare live runs on a sandbox with the twin's predictions."""


@main.command()
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--number", type=click.IntRange(1, 9), default=1, show_default=True,
              help="Which run of these workloads it is; those of other numbers are kept.")  # fmt: skip
def live(names: tuple[str, ...], out: Path, number: int) -> None:
    """Run workloads on a sandbox; leave the machine alone meanwhile."""
    workloads = chosen(names or _EVERY)
    out.mkdir(parents=True, exist_ok=True)
    for workload in workloads:
        name = workload.name if number == 1 else f"{workload.name}.{number}"
        run = run_live(workload, out / f"{name}.log")
        (out / f"{name}.json").write_text(json.dumps({**dump(run), "machine": describe_machine()}) + "\n")
        click.echo(f"{workload.name}: average JCT {run.average_jct_s:.1f} s, makespan {run.makespan_s:.1f} s")


@main.command()
@click.argument("folder_of_runs", metavar="FOLDER", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("names", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(folder_of_runs: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Run in the twin what ran live, and print both."""
    comparisons = compare_all(folder_of_runs, names)
    if not comparisons:
        raise click.UsageError(f"{folder_of_runs} holds no live run of these workloads; make some with `live`")
    if as_json:
        click.echo(json.dumps({"machine": describe_machine(), "rows": [each.row() for each in comparisons]}, indent=1))
    else:
        click.echo(_table(comparisons))


if __name__ == "__main__":
    main()
