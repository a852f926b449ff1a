"""A Slurm in virtual time in which jobs run for their time, groups work, and a hostile user acts on what is his."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fake_slurm import FakeSlurm
from odd import DEPENDENCIES, Odd, written
from users import BOB, Attack, dry_run_result, pilot_report

from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Node
from muri.slurm_plugin.records.roles import is_behind_license

DRY_RUN_S: Final = 60.0
_HOSTILE_RUN_S: Final = 90.0
_MOST_CPUS: Final = 10_000  # Slurm changes nothing in a job that asks for more than there is
_NAME: Final = re.compile(r"[A-Za-z0-9]+(,[A-Za-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a job that ended by itself."""

    job: Job  # Its record in this run
    alone: bool  # Whether it held its GPUs itself; else it was the member of a group


@dataclass(slots=True)
class Work:
    """How long ordinary jobs run, and what came of them."""

    run_s: dict[int, float]
    runs: dict[int, list[Run]] = field(default_factory=dict)


class VirtualSlurm(FakeSlurm):
    """Starts jobs on partitions' nodes and ends them when their time is over."""

    def __init__(
        self, ordinary: Sequence[Job], run_s: dict[int, float], attacks: Sequence[Attack], nodes: list[Node], *,
        gate_license: bool,
    ) -> None:  # fmt: skip
        super().__init__([*ordinary, *(attack.job for attack in attacks)], nodes, gate_license=gate_license)
        self.work = Work(run_s)
        self.ordinary = frozenset(run_s)
        self._next_id = 1_000_000
        self._acts = {attack.job.job_id: Odd(attack.seed) for attack in attacks}

    def refuses(self, job_id: int) -> bool:
        """Whether no nodes could ever hold a job: Slurm neither changes nor releases it."""
        job = self.jobs[job_id]
        return job_id in self._acts and (job.cpu_count > _MOST_CPUS or job.node_count > len(self.nodes))

    def _refuse(self, job_id: int) -> None:
        if self.refuses(job_id):
            raise GatewayError(f"cannot change job {job_id}: Requested partition configuration not available now")

    def _modify(self, job_id: int, change: JobChange) -> None:
        self._refuse(job_id)
        super()._modify(job_id, change)

    def release(self, job_id: int) -> None:
        self._refuse(job_id)
        super().release(job_id)

    def job_environment(self, job_id: int) -> dict[str, str] | None:
        found = super().job_environment(job_id)
        if job_id not in self._acts or found is None:
            return found
        odd = Odd(job_id)
        return found | {"NAME": odd.text(), "LD_PRELOAD": odd.text(), "SLURM_CONF": "/tmp/x"}

    def tick(self, seconds: float = 10.0) -> None:
        """Let time pass: jobs end, the hostile user acts, jobs start."""
        self.now_s += seconds
        self._end_runs()
        self._be_hostile()
        self._start_all()

    def _end_runs(self) -> None:
        running = [job for job in self.jobs.values() if job.state is JobState.RUNNING]
        for job in running:
            state = tags.parse_state(job.admin_comment)
            pilot = self.jobs.get(state.pilot) if state else None
            if state and (pilot is None or not pilot.state.is_active):
                self._requeue(job.job_id)  # what `muri run` does when its runtime is gone
                self.starts[job.job_id] -= 1
            elif self.now_s - job.start_s >= self._run_s(job):
                self._ended(job)
        for job in running:
            tag = tags.parse_pilot(job.admin_comment)
            if tag and not any(self._is_active(member) for member in tag.members):
                self.end(job.job_id)

    def _is_active(self, job_id: int) -> bool:
        return job_id in self.jobs and self.jobs[job_id].state.is_active

    def _run_s(self, job: Job) -> float:
        if tags.parse_pilot(job.admin_comment):
            return job.time_limit_s or float("inf")
        if tags.token(job.admin_comment, tags.DRY_RUN_PREFIX) is not None:
            return DRY_RUN_S
        return self.work.run_s.get(job.job_id, _HOSTILE_RUN_S)

    def _ended(self, job: Job) -> None:
        if job.job_id in self.ordinary:
            runs = self.work.runs.setdefault(job.job_id, [])
            runs.append(Run(job, alone=tags.parse_state(job.admin_comment) is None))
        token = tags.token(job.admin_comment, tags.DRY_RUN_PREFIX)
        if token is not None and job.user != BOB["user"]:
            self._report(job, token)
        self.end(job.job_id)

    def _report(self, run: Job, token: str) -> None:
        """An ordinary dry run leaves its result in its own comment."""
        figures = dict(
            zip(("load_s", "preprocess_s", "propagate_s", "synchronize_s"), (0.1, 0.2, 0.3, 0.0), strict=True)
        )
        result = {**figures, "iteration_s": 0.6, "iterations": 20, "token": token}
        self._update(run.job_id, comment=tags.PROFILE_PREFIX + written(result))

    def _start_all(self) -> None:
        free = self.free()
        for job in self._in_order():
            if job.state is JobState.PENDING:
                why = self._why_waiting(job)
                if not why and (nodes := self._take(job, free)):
                    self._start(job, ",".join(nodes))
                elif not job.held:
                    self._update(job.job_id, reason=why or self._why_no_nodes(job))

    def _take(self, job: Job, free: dict[str, int]) -> list[str]:
        """Take nodes for a job; none when it must wait."""
        count = max(1, job.node_count)
        if count > len(free) or job.gpu_count % count:
            return []
        each = job.gpu_count // count
        fitting = [name for name in self._may_have(job) if free[name] >= each][:count]
        if len(fitting) < count:
            return []
        for name in fitting:
            free[name] -= each
        return fitting

    def _why_no_nodes(self, job: Job) -> str:
        """Slurm tells the missing resource only when the job's turn comes; until then it says Priority."""
        return "Priority" if job.job_id % 2 else "Resources" if self._may_have(job) else "BadConstraints"

    def _why_waiting(self, job: Job) -> str:
        if job.held:
            return job.reason
        if is_behind_license(job) and self.lease_end_s > self.now_s:
            return "Licenses"
        if job.begin_s > self.now_s:
            return "BeginTime"
        return "" if self._may_depend(job) else "Dependency"

    def _may_depend(self, job: Job) -> bool:
        found = re.fullmatch(r"after:(\d+)", job.dependency)
        if not job.dependency or found is None:
            return not job.dependency
        other = self.jobs.get(int(found[1]))
        return other is None or other.state is not JobState.PENDING

    def _may_have(self, job: Job) -> list[str]:
        """Nodes of its partition, without what is odd in its request: such a job waits."""
        wanted = [text for text in (job.required_nodes, job.excluded_nodes) if text]
        if job.features or job.reservation or not all(_NAME.fullmatch(text) for text in wanted):
            return []
        names = [name for name, node in sorted(self.nodes.items()) if job.partition in node.partitions]
        if job.required_nodes:
            names = [name for name in names if name in job.required_nodes.split(",")]
        return [name for name in names if name not in job.excluded_nodes.split(",")]

    def _be_hostile(self) -> None:
        for job in [job for job in self.jobs.values() if job.user == BOB["user"] and job.state.is_active]:
            tag = tags.parse_pilot(job.admin_comment)
            token = tags.token(job.admin_comment, tags.DRY_RUN_PREFIX)
            if tag is not None:
                self._act_on_pilot(job, tag)
            elif token is not None:
                self._act_on_dry_run(job, token)
            elif job.job_id in self._acts:
                self._act_on_own(job, self._acts[job.job_id])

    def _act_on_pilot(self, pilot: Job, tag: tags.PilotTag) -> None:
        odd = Odd(f"pilot {tag.members} {self.now_s}")
        self._update(pilot.job_id, comment=pilot_report(odd, tag.members), name=odd.text("muri:1+2"))
        if odd.chance(0.1):
            self.end(pilot.job_id, state=odd.one((JobState.CANCELLED, JobState.FAILED)))
        elif pilot.state is JobState.PENDING and odd.chance(0.1):
            self._update(pilot.job_id, held=True, reason="JobHeldUser")

    def _act_on_dry_run(self, run: Job, token: str) -> None:
        odd = Odd(f"run {run.work_dir!r} {self.now_s}")
        self._update(run.job_id, comment=dry_run_result(odd, token), name=odd.text("muri-dryrun"))
        if odd.chance(0.3):
            for job_id in sorted(self._acts):
                if self._is_active(job_id) and odd.chance(0.3):
                    self._update(job_id, comment=dry_run_result(odd, token))
        if odd.chance(0.1):
            self.end(run.job_id, state=JobState.CANCELLED)

    def _act_on_own(self, job: Job, odd: Odd) -> None:
        """What any user may do to his own job, now and then."""
        if odd.chance(0.85):
            return
        pending = job.state is JobState.PENDING
        acts = [
            lambda: self._update(job.job_id, comment=odd.comment(written(odd.json()))),
            lambda: self._update(job.job_id, name=odd.text("job")),
            lambda: self.end(job.job_id, state=JobState.CANCELLED),
        ]
        if pending:
            acts += [
                lambda: self._update(job.job_id, held=True, reason="JobHeldUser"),
                lambda: self._update(job.job_id, held=False, reason=""),
                lambda: self._update(job.job_id, dependency=odd.one(DEPENDENCIES)),
                lambda: self._update(job.job_id, licenses=odd.one(("", "matlab:1", "muri_gate:1"))),
                lambda: self._update(job.job_id, time_limit_s=odd.one((60, 3600))),
                lambda: self._update(job.job_id, gpu_count=1, gpu_request="gres/gpu:1"),
            ]
        elif job.can_requeue:
            acts += [lambda: self._requeue(job.job_id)]
        try:
            odd.random.choice(acts)()
        except NoSuchJobError:
            return
