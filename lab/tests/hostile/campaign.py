"""Whole cycles of the controller with hostile jobs among ordinary ones, and what came of the ordinary ones."""

import io
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from fake_slurm import FOUR_KINDS, NOW_S, behind_license, make_job, make_node
from users import Attack, attacks
from virtual_slurm import VirtualSlurm

from muri.profiler.store import ProfileStore
from muri.slurm_plugin.cli.look import explanation
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_controller
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.controller.status import STATUS_NAME, read_status, refresh
from muri.slurm_plugin.execute.gate import drain
from muri.slurm_plugin.records.cluster import Job, JobState, Node, dump_snapshot, parse_snapshot
from muri.slurm_plugin.records.roles import Role, view_of
from muri.text import log_handler, printable

Gate = Literal["license", "hold"]
Profiling = Literal["in-place", "dry-run"]

CYCLE_S: Final = 60.0
_KINDS: Final = 4
APART: Final = frozenset({"muri-s", "muri-l", "muri-slurm", "horus", "sjf-bsbf", "tiresias"})
"""Policies that plan each partition by itself. `auto`, `muri-jct` and `muri-hybrid` ask whether every job of the
cluster tells its duration, and Synergy's order spans all partitions."""

_LOGGER: Final = "muri.controller"


@dataclass(frozen=True, slots=True)
class Campaign:
    """What to try.

    Attributes:
        apart: Whether the hostile jobs have a partition of their own, and the ordinary ones profiles, so that no
            job waits for another's GPUs or dry runs; else all compete.
    """

    policy: str = "auto"  # Of the controller
    gate: Gate = "license"  # Gate of waiting jobs
    seed: int = 1  # What the hostile jobs depend on
    hostile: int = 100  # How many there are
    ordinary: int = 20  # How many ordinary ones there are
    apart: bool = True
    profiling: Profiling = "in-place"  # How models without a profile are measured. All else is as shipped.

    def attacks(self) -> list[Attack]:
        """The hostile jobs."""
        partition = "bulk" if self.apart else "main"
        return attacks(self.seed, self.hostile, partition, gate_license=self.gate == "license")


@dataclass(slots=True)
class Outcome:
    """What came of a campaign.

    Attributes:
        left_out: Errors while deciding, the fault of a hostile job, without harm to others.
        ends: How each ordinary job ended: when, in seconds from the start, and "alone" or "member".
    """

    failures: list[str] = field(default_factory=list)  # Broken rules, for people
    cycles: int = 0  # How many there were
    longest_cycle_s: float = 0.0  # Real seconds of the longest
    left_out: set[str] = field(default_factory=set)
    ends: dict[int, tuple[float, str]] = field(default_factory=dict)


def ordinary_jobs(campaign: Campaign) -> dict[int, tuple[Job, float]]:
    """Return ordinary jobs of alice's with their run times in seconds.

    Where they compete with the hostile ones, each fifth is of a model without a profile.
    """
    found = {}
    for number in range(1, campaign.ordinary + 1):
        model = f"new{number % 3}" if number % 5 == 0 and not campaign.apart else f"m{number % _KINDS + 1}"
        run_s = 120.0 + 60 * (number % 7)
        job = make_job(
            number, admin_comment=f"muri:model={model},batch-size=8,duration={run_s:.0f}", cpu_count=1, cpus_per_task=1,
            submit_s=NOW_S - 100 + number / 100,
        )  # fmt: skip
        found[number] = (behind_license(job) if campaign.gate == "license" else job, run_s)
    return found


def cluster(ordinary: int) -> list[Node]:
    """Nodes for ordinary jobs, about one GPU for ten of them, and nodes apart."""
    count = max(1, ordinary // 20)
    main = [make_node(f"n{number}", cpu_count=64, features=("fast",)) for number in range(1, count + 1)]
    return main + [make_node(f"b{number}", cpu_count=64, partitions=("bulk",)) for number in range(1, 4)]


def run(campaign: Campaign, folder: Path, chosen: Sequence[Attack] | None = None) -> Outcome:
    """Run cycles until every ordinary job has ended."""
    hostile = campaign.attacks() if chosen is None else chosen
    jobs = ordinary_jobs(campaign)
    slurm = VirtualSlurm(
        [job for job, _ in jobs.values()], {number: run_s for number, (_, run_s) in jobs.items()}, hostile,
        cluster(campaign.ordinary), gate_license=campaign.gate == "license",
    )  # fmt: skip
    outcome = Outcome()
    slurm.extend_lease(slurm.now_s + 600) if slurm.gate_license else None
    with _log() as lines, _controller(campaign, slurm, folder) as controller:
        most = 60 + 12 * campaign.ordinary
        while outcome.cycles < most and any(slurm.jobs[number].state.is_active for number in jobs):
            _cycle(controller, slurm, folder, outcome)
            if len(outcome.failures) > 20:
                break
            slurm.tick(CYCLE_S)
        _look(slurm, folder, outcome)
        _drain(slurm, outcome)
    _judge_log(lines.getvalue(), outcome)
    _judge_jobs(slurm, jobs, outcome)
    return outcome


@contextmanager
def _log() -> Iterator[io.StringIO]:
    """What the controller would write to its log."""
    stream, handler, logger = io.StringIO(), log_handler(), logging.getLogger()
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    level, others = logger.level, logger.handlers
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logger.handlers = others
        logger.setLevel(level)


@contextmanager
def _controller(campaign: Campaign, slurm: VirtualSlurm, folder: Path) -> Iterator[Controller]:
    config = Config(
        policy=campaign.policy, gate=campaign.gate, state_dir=folder / "state", status_dir=folder / "status",
        profiling={"mode": campaign.profiling},
    ).tuned(cycle_limit_s=1e9)  # fmt: skip # real seconds, which decide nothing in virtual time
    config.state_dir.mkdir(mode=0o700)
    with ProfileStore(config.state_dir / "profiles.db") as store:
        store.put_all(FOUR_KINDS)
    with open_controller(config, slurm) as controller:
        yield controller


def _cycle(controller: Controller, slurm: VirtualSlurm, folder: Path, outcome: Outcome) -> None:
    number, began_s = outcome.cycles, time.perf_counter()
    outcome.cycles += 1
    try:
        status = controller.cycle()
    except Exception as error:
        logging.getLogger(_LOGGER).exception("a cycle is lost")
        outcome.failures.append(f"cycle {number}: {type(error).__name__}: {str(error)[:300]}")
        return
    finally:
        outcome.longest_cycle_s = max(outcome.longest_cycle_s, time.perf_counter() - began_s)
    outcome.left_out |= {error[:300] for error in status.errors if "Muri failed on" in error or " failed: " in error}
    try:
        written = read_status(folder / "state" / STATUS_NAME)
        json.dumps(asdict(written))
        if written.cycle_s != slurm.now_s:
            outcome.failures.append(f"cycle {number}: the status file is of another cycle")
    except Exception as error:
        outcome.failures.append(f"cycle {number}: the status file cannot be read: {error!r}"[:300])


def _look(slurm: VirtualSlurm, folder: Path, outcome: Outcome) -> None:
    """Do what `muri queue`, `muri explain` and `muri plan --save` do."""
    snapshot = slurm.snapshot()
    try:
        shown = refresh(read_status(folder / "state" / STATUS_NAME), view_of(snapshot))
        for job in shown.jobs:
            assert all(printable(line).isprintable() for line in explanation(job))
        if parse_snapshot(dump_snapshot(snapshot).encode("utf-8").decode()) != snapshot:
            outcome.failures.append("a snapshot is not what its file says")
    except Exception as error:
        outcome.failures.append(f"the queue cannot be shown: {error!r}"[:300])


def _drain(slurm: VirtualSlurm, outcome: Outcome) -> None:
    """Do what `muri drain` does: no job is left that Muri keeps, but those that Slurm itself refuses to release."""
    try:
        drained = drain(slurm, slurm.tagged)
    except Exception as error:
        outcome.failures.append(f"the drain failed: {error!r}"[:300])
        return
    refused = {f"job {job_id}:" for job_id in slurm.jobs if slurm.refuses(job_id)}
    left = [why for why in drained.failed if not why.startswith(tuple(refused))]
    outcome.failures += [f"the drain left a job behind: {why}"[:300] for why in left]
    for job in view_of(slurm.snapshot()).jobs.values():
        if job.role is Role.CANDIDATE and job.held and not slurm.refuses(job.job_id):
            outcome.failures.append(f"the drain left job {job.job_id} held")


def _judge_log(text: str, outcome: Outcome) -> None:
    for line in text.split("\n"):
        if not line.isprintable():
            outcome.failures.append(f"a log line is not printable: {line[:200]!r}")
            return


def _judge_jobs(slurm: VirtualSlurm, jobs: dict[int, tuple[Job, float]], outcome: Outcome) -> None:
    for number, (asked, _) in jobs.items():
        job, runs = slurm.jobs[number], slurm.work.runs.get(number, [])
        if job.state is not JobState.COMPLETED or len(runs) != 1 or slurm.starts.get(number) != 1:
            outcome.failures.append(
                f"ordinary job {number} is {job.state} ({job.reason}) after {slurm.starts.get(number, 0)} starts and "
                f"{len(runs)} full runs"
            )
            continue
        ran = runs[0].job
        as_asked = (ran.gpu_count, ran.gpu_request) == (asked.gpu_count, asked.gpu_request)
        if runs[0].alone and not as_asked:
            outcome.failures.append(f"ordinary job {number} ran alone with {ran.gpu_count} GPUs ({ran.gpu_request})")
        outcome.ends[number] = (job.end_s - NOW_S, "alone" if runs[0].alone else "member")


def compared(campaign: Campaign, found: Outcome, folder: Path) -> list[str]:
    """Return how ordinary jobs fared otherwise than without the hostile ones; for campaigns apart."""
    alone = run(replace(campaign, hostile=0), folder)
    if alone.failures:
        return [f"without hostile jobs: {failure}" for failure in alone.failures]
    return [
        f"ordinary job {number} ended {found.ends.get(number)}, without hostile jobs {end}"
        for number, end in alone.ends.items()
        if found.ends.get(number) != end
    ]
