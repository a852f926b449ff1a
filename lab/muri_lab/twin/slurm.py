"""A virtual slurmctld with its nodes: the life cycle of jobs, holds, dependencies, requeues, limits and outages.

It answers in Slurm's own words. The same cases run against it and a real Slurm (tests/slurm/slurm_cases.py).
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final

from ClusterShell.NodeSet import NodeSet

from muri.clock import whole_minutes
from muri.slurm_plugin.gateway.base import SlurmUnreachableError, slurm_error
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Node, Reservation
from muri.slurm_plugin.records.roles import GATE_LICENSE, REQUEUED_HELD, is_behind_license
from muri_lab.twin.clock import Event, VirtualTime
from muri_lab.twin.limits import why_over_limits, why_refused
from muri_lab.twin.records import Held, Holder, Ledger, Need, Note, Program, Run
from muri_lab.twin.schedule import Backlog, Free, need_of, why_unready
from muri_lab.twin.site import Site

_HELD_REASONS: Final[Mapping[Holder, str]] = {"muri": "JobHeldUser", "user": "JobHeldUser", "admin": "JobHeldAdmin"}
_FIRST_PRIORITY: Final = 4_294_900_000
_NOT_LOOKED_AT: Final = frozenset({"BeginTime", "Dependency", "DependencyNeverSatisfied"})
"""Reasons of jobs that are not in the schedulers' queue, and so hold up no other tasks of their array."""

_START_AGAIN_S: Final = 2.0  # After a change of its begin time Slurm starts a requeued job this much later


@lru_cache(maxsize=4096)
def folded(names: tuple[str, ...]) -> str:
    """Fold node names as Slurm shows them."""
    return names[0] if len(names) == 1 else str(NodeSet.fromlist(list(names)))


@lru_cache(maxsize=4096)
def unfolded(text: str) -> tuple[str, ...]:
    """Names in a folded host list, in its order."""
    return tuple(str(name) for name in NodeSet(text)) if "[" in text or "," in text else (text,) if text else ()


class VirtualSlurm:
    """slurmctld and slurmd in one."""

    def __init__(self, time: VirtualTime, site: Site) -> None:
        self.time = time  # The clock
        self.site = site  # The cluster
        self._begun_s = time.now_s
        self.jobs: dict[int, Job] = {}  # Every job that slurmctld remembers, by id
        self.ledger: dict[int, Ledger] = {}  # What slurmctld knows of each job besides; kept for ended jobs, too
        self.nodes = {node.name: node for node in site.nodes}  # Every node by name, without what is given out
        self.lease_end_s = 0.0  # Until when the license is withheld
        self.reservations = site.reservations  # Reservations of administrators
        self.away = False  # Whether slurmctld is down. Jobs run on, and end once it is back.
        self.notes: list[Note] = []  # Are told of what happens
        self.epilog: Callable[[Run, Callable[[], None]], None] = lambda run, done: done()
        """What the nodes do at the end of a run, before its resources are free; it calls back when it is over."""
        self.users: dict[int, str] = {}  # Names of those that have submitted jobs, by uid
        self.free = {node.name: Free.of(node) for node in site.nodes}
        self._next_id = 1
        self._submissions = 0
        self._waiting: set[int] = set()
        self._gated: set[int] = set()
        self._gated_tasks: set[int] = set()
        self._look: Event | None = None
        self._backfill: Event | None = None
        self._ended: deque[tuple[float, int]] = deque()
        self._late_exits: list[Callable[[], None]] = []
        self._shown: tuple[Node, ...] | None = None

    # What anybody sees

    @property
    def now_s(self) -> float:
        """The time."""
        return self.time.now_s

    @property
    def lease_runs(self) -> bool:
        """Whether the license `muri_gate` is withheld."""
        return self.site.conf.gate_license and self.lease_end_s > self.now_s

    def shown_nodes(self) -> tuple[Node, ...]:
        """All nodes by name, with what is given out."""
        if self._shown is None:
            self._shown = tuple(self._shown_node(node) for _, node in sorted(self.nodes.items()))
        return self._shown

    def _shown_node(self, node: Node) -> Node:
        free = self.free[node.name]
        return replace(
            node,
            gpus_allocated=node.gpu_count - free.gpus,
            cpus_allocated=node.cpu_count - free.cpus,
            mem_allocated_mib=node.mem_mib - free.mem_mib,
        )

    def shown_reservations(self) -> tuple[Reservation, ...]:
        """All reservations, the lease among them."""
        lease = Reservation(GATE_LICENSE, "", 0.0, self.lease_end_s, ("LICENSE_ONLY",), f"{GATE_LICENSE}:1000000")
        return (*self.reservations, *((lease,) if self.lease_runs else ()))

    def known(self, job_id: int, action: str) -> Job:
        """Return a job."""
        job = self.jobs.get(job_id)
        if job is None:
            raise slurm_error(f"{action} job {job_id}", "Invalid job id specified")
        return job

    def answering(self) -> None:
        """Refuse where slurmctld is away."""
        if self.away:
            raise SlurmUnreachableError("Unable to contact slurm controller (connect failure)")

    # Submitting

    def submit(
        self, job: Job, program: Program, environment: Mapping[str, str] | None = None, *, holder: Holder = ""
    ) -> int:
        """Put a job into the queue; its id, times and state are Slurm's."""
        return self._accept(job, [program], environment or {}, holder)

    def submit_array(
        self,
        job: Job,
        tasks: Sequence[Program],
        most_tasks: int,
        environment: Mapping[str, str],
        *,
        holder: Holder = "",
    ) -> int:
        """Put a job array into the queue; its id is that of the record that stands for the tasks that wait."""
        job_id = self._accept(job, tasks, environment, holder)
        book, record = self.ledger[job_id], self.jobs[job_id]
        book.array, book.tasks, book.most_tasks = job_id, list(tasks), most_tasks
        numbers = ",".join(map(str, range(len(tasks))))
        self._put(replace(record, array_job_id=job_id, array_tasks=numbers, array_limit=most_tasks))
        return job_id

    def _accept(self, job: Job, tasks: Sequence[Program], environment: Mapping[str, str], holder: Holder) -> int:
        each_task = (job for job in self.jobs.values() for _ in range(max(1, len(self.ledger[job.job_id].tasks))))
        if why := why_refused(job, each_task, self.site.limits, len(tasks)):
            raise slurm_error("submit a job", f"Batch job submission failed: {why}")
        if job.partition not in {part for node in self.nodes.values() for part in node.partitions}:
            raise slurm_error("submit a job", "Batch job submission failed: Invalid partition name specified")
        job_id, self._next_id = self._next_id, self._next_id + 1
        self._submissions += 1
        self.users[job.uid] = job.user
        placed = replace(
            job, job_id=job_id, submit_s=self.now_s, state=JobState.PENDING, held=bool(holder), start_s=0.0, end_s=0.0,
            reason=_HELD_REASONS.get(holder, ""), priority=0 if holder else _FIRST_PRIORITY - self._submissions,
            nodes="", restart_count=0, exit_code=0,
        )  # fmt: skip
        if (mib := self.site.conf.def_mem_per_cpu_mib) and not job.mem_per_node_mib:
            each = mib * max(1, -(-job.cpu_count // max(1, job.node_count)))
            placed = replace(placed, mem_per_node_mib=each, mem_per_cpu_mib=mib)
        self.ledger[job_id] = Ledger(placed, tasks[0], holder, dict(environment))
        self._put(placed)
        self._tell("submitted", placed)
        return job_id

    # Changing

    def modify(self, job_id: int, change: JobChange) -> None:
        """Change a job as an administrator."""
        job = self._alive(job_id, "change")
        if job.state is not JobState.PENDING and not is_harmless(change):
            raise slurm_error(f"change job {job_id}", "Job is no longer pending execution")
        if change.required_nodes and not set(unfolded(change.required_nodes)) <= self.nodes.keys():
            raise slurm_error(f"change job {job_id}", "Invalid node name specified")
        self._put(replace(job, **changed_fields(job, change, self.now_s)))

    def _alive(self, job_id: int, action: str) -> Job:
        job = self.known(job_id, action)
        if not job.state.is_active:
            raise slurm_error(f"{action} job {job_id}", "Job/step already completing or completed")
        return job

    def hold(self, job_id: int, by: Holder = "muri") -> None:
        """Hold a waiting job; one that is held already keeps its holder."""
        job = self._alive(job_id, "hold")
        if job.state is not JobState.PENDING:
            raise slurm_error(f"hold job {job_id}", "Job is no longer pending execution")
        if not job.held or by == "admin":
            self.ledger[job_id].holder = by
            self._put(replace(job, held=True, reason=_HELD_REASONS[by], priority=0))

    def release(self, job_id: int, by: str = "muri") -> None:
        """Release a waiting job."""
        job = self.known(job_id, "release")
        if job.state is not JobState.PENDING:
            return
        priority = self.ledger[job_id].asked.priority or _FIRST_PRIORITY - job_id
        if not job.held:
            self._put(replace(job, priority=priority))
            return
        if by == "user" and self.ledger[job_id].holder == "admin":
            raise slurm_error(f"release job {job_id}", "Access/permission denied")
        if by == "muri" and self.ledger[job_id].holder in {"user", "admin"}:
            self._tell("hold overridden", job)
        self.ledger[job_id].holder, self.ledger[job_id].released_s = "", self.now_s
        self._put(replace(job, held=False, reason="", priority=priority))

    def requeue(self, job_id: int, by: str = "muri", *, held: bool = False) -> None:
        """End a running job's run and put it back into the queue; held or not, a waiting one stays where it is."""
        job = self._alive(job_id, "requeue")
        if job.state is JobState.COMPLETING:
            raise slurm_error(f"requeue job {job_id}", "Job/step already completing or completed")
        book = self.ledger[job_id]
        if job.state is JobState.PENDING:
            if held:
                book.holder = "muri" if by == "muri" else "admin"
                self._put(replace(job, held=True, reason=REQUEUED_HELD, priority=0))
            return
        if not job.can_requeue:
            raise slurm_error(f"requeue job {job_id}", "Requested operation is presently disabled")
        book.goes_back, book.by = "held" if held else "queue", by
        self._end_soon(job)

    def cancel(self, job_id: int, by: str = "muri") -> None:
        """Cancel a job, or all tasks of a job array; an ended one stays as it is."""
        for each in self.meant_by(job_id):
            self._cancel(each, by)

    def meant_by(self, job_id: int) -> list[int]:
        """The jobs that an id stands for: all tasks of a job array, where it is the array's."""
        book = self.ledger.get(job_id)
        if book is None or book.array != job_id:
            return [job_id]
        return [each for each in self.jobs if self.ledger[each].array == job_id]

    def _cancel(self, job_id: int, by: str) -> None:
        job = self.jobs.get(job_id)
        if job is None or not job.state.is_active:
            return
        book = self.ledger[job_id]
        book.by, book.goes_back = by, ""
        if by == "muri":
            self._tell("cancelled by Muri", job)
        if job.state is JobState.PENDING:
            self._final(replace(job, state=JobState.CANCELLED, end_s=self.now_s))
        else:
            book.ends_as = JobState.CANCELLED
            self._end_soon(job)

    def set_admin_comment(self, job_id: int, text: str) -> None:
        """Change a job's AdminComment, as an administrator who knows nothing of Muri."""
        self._put(replace(self.jobs[job_id], admin_comment=text))

    def set_comment(self, job_id: int, text: str) -> None:
        """Change the job's own comment, as its user."""
        if job_id in self.jobs:
            self._put(replace(self.jobs[job_id], comment=text))

    def update_by_owner(self, job_id: int, **fields: Any) -> None:
        """Change a job's request as its user or an administrator; Muri has to honor that."""
        job = self._alive(job_id, "change")
        if job.state is not JobState.PENDING and fields.keys() != {"time_limit_s"}:
            raise slurm_error(f"change job {job_id}", "Job is no longer pending execution")
        book = self.ledger[job_id]
        book.asked = replace(book.asked, **fields)
        self._put(replace(job, **fields))

    # Starting

    def _put(self, job: Job) -> None:
        """Take over a job's new record; look at the queue soon where it may start."""
        self.jobs[job.job_id] = job
        if job.state is JobState.PENDING and not job.held:
            gated = is_behind_license(job)
            if gated and self.lease_runs:
                self._reason(job, "Licenses")
            (self._gated if gated else self._waiting).add(job.job_id)
            (self._waiting if gated else self._gated).discard(job.job_id)
            (self._gated_tasks.add if gated and job.array_job_id else self._gated_tasks.discard)(job.job_id)
            if not gated or not self.lease_runs:
                self.look_soon()
        else:
            for ids in (self._waiting, self._gated, self._gated_tasks):
                ids.discard(job.job_id)

    def look_soon(self) -> None:
        """Let the schedulers look at the queue, each with its next tick."""
        self._backfill_later()
        if self._look is None:
            conf = self.site.conf
            self._look = self.time.at(self._next(conf.tick_s, conf.tick_at_s), self._main_pass)

    def _next(self, period_s: float, at_s: float) -> float:
        """The next time of a train of ticks."""
        first_s = self._begun_s + at_s
        return first_s + period_s * math.floor((self.now_s - first_s) / period_s + 1)

    def _main_pass(self) -> None:
        self._look = None
        self._pass(backfill=False)

    def _backfill_pass(self) -> None:
        self._backfill = None
        self._pass(backfill=True)

    def _pass(self, *, backfill: bool) -> None:
        """Start what can start, in order of priority."""
        if self.away:
            return
        backlog = Backlog(self, backfill=backfill)
        stuck: dict[int, str] = {}
        for job_id in self._in_order():
            array = self.ledger[job_id].array
            while (job := self.jobs[job_id]).state is JobState.PENDING and array not in stuck:
                if not self._starts(job, backlog):
                    break  # else the next task, where it is a job array
            if job.state is JobState.PENDING and array in stuck:
                self._reason(job, stuck[array])  # one task of an array speaks for those behind it
            elif array and job.state is JobState.PENDING and self.jobs[job_id].reason not in _NOT_LOOKED_AT:
                stuck[array] = self.jobs[job_id].reason
        if self._waiting:
            self._backfill_later()

    def _starts(self, job: Job, backlog: Backlog) -> bool:
        """Start a job, or an array's next task, if it can; say why it waits if it cannot."""
        if why := self._why_waiting(job):
            self._reason(job, why)
            return False
        nodes, why = backlog.nodes_for(job)
        if nodes:
            self._start(self._split_off(job, 0), nodes)
        else:
            self._reason(job, why)
        return bool(nodes)

    def split_tasks(self, job_id: int, tasks: Iterable[int]) -> None:
        """Give tasks of an array records of their own."""
        for task in tasks:
            job = self._alive(job_id, "split")
            if str(task) not in job.array_tasks.split(","):
                raise slurm_error(f"split job {job_id}", "Invalid job id specified")
            self._split_off(job, job.array_tasks.split(",").index(str(task)))

    def _split_off(self, job: Job, place: int) -> Job:
        """Let one of the tasks of an array's record leave it, unless it is the last one."""
        book = self.ledger[job.job_id]
        if len(book.tasks) < 2:
            book.tasks = []
            return job
        job_id, self._next_id = self._next_id, self._next_id + 1
        numbers = job.array_tasks.split(",")
        task = replace(job, job_id=job_id, array_tasks=numbers.pop(place))
        asked = replace(book.asked, job_id=job_id)
        self.ledger[job_id] = replace(book, asked=asked, program=book.tasks.pop(place), tasks=[])
        book.program = book.tasks[0]
        self._put(replace(job, array_tasks=",".join(numbers)))
        self._put(task)
        self._tell("split", task)
        return task

    def _backfill_later(self) -> None:
        if self._backfill is None:
            conf = self.site.conf
            self._backfill = self.time.at(self._next(conf.bf_interval_s, conf.bf_at_s), self._backfill_pass)

    def _in_order(self) -> list[int]:
        ids = self._waiting | (self._gated_tasks if self.lease_runs else self._gated)
        return sorted(ids, key=lambda job_id: _place(self.jobs[job_id]))

    def _reason(self, job: Job, why: str) -> None:
        if job.reason != why:
            self.jobs[job.job_id] = replace(job, reason=why)

    def _why_waiting(self, job: Job) -> str:
        """Why a job cannot start now, whatever is free; "" when it can."""
        if why := why_unready(job, self.jobs, self.now_s):
            if why == "BeginTime":
                self.time.at(job.begin_s, self.look_soon)
            return why
        if is_behind_license(job) and self.lease_runs:
            return "Licenses"
        book, running = self.ledger[job.job_id], self.running()
        if book.most_tasks and sum(self.ledger[each.job_id].array == book.array for each in running) >= book.most_tasks:
            return "JobArrayTaskLimit"
        return why_over_limits(job, running, self.site.limits)

    def need_of(self, job: Job) -> Need:
        """A job's need on each of its nodes."""
        return need_of(job, self.site.limits.partition(job.partition))

    def held_on(self, name: str) -> Iterator[tuple[float, Held]]:
        """Until when running jobs hold what of a node, as far as their time limits tell."""
        for job in self.running():
            for node, held in self.ledger[job.job_id].placed:
                if node == name:
                    yield job.start_s + job.time_limit_s if job.time_limit_s else float("inf"), held

    def running(self) -> list[Job]:
        """Jobs that run."""
        return [job for job in self.jobs.values() if job.state is JobState.RUNNING]

    def usable_by(self, job: Job) -> Iterator[Node]:
        """Nodes that a job may get, busy ones included."""
        required, excluded = set(unfolded(job.required_nodes)), set(unfolded(job.excluded_nodes))
        wanted = set(job.features.split("&")) - {""}
        closed = {
            name
            for each in self.reservations
            if each.start_s <= self._end_of(job) and self.now_s < each.end_s and each.name != job.reservation
            for name in unfolded(each.nodes)
        }
        for name, node in self.nodes.items():
            if (
                node.usable
                and job.partition in node.partitions
                and (not required or name in required)
                and name not in excluded
                and name not in closed
                and wanted <= set(node.features)
            ):
                yield node

    def _end_of(self, job: Job) -> float:
        return self.now_s + job.time_limit_s if job.time_limit_s else float("inf")

    def _start(self, job: Job, names: tuple[str, ...]) -> None:
        count, need = len(names), self.need_of(job)
        placed = tuple((name, held) for name in names if (held := self.free[name].take(need)) is not None)
        self._shown = None
        run = Run(job.job_id, job.restart_count)
        book = self.ledger[job.job_id]
        book.placed, book.run, book.goes_back, book.ends_as = placed, run, "", ""
        started = replace(
            job,
            state=JobState.RUNNING,
            nodes=folded(names),
            start_s=self.now_s,
            reason="",
            cpu_count=need.cpus * count,
        )
        self._put(started)
        self._tell("started", started)
        self.time.after(self.site.delays.launch_s, lambda: self._launch(run))
        if job.time_limit_s:
            self._watch_limit(run)

    def _launch(self, run: Run) -> None:
        if self.is_under_way(run):
            self.ledger[run.job_id].program.start(run)

    def is_under_way(self, run: Run) -> bool:
        """Whether a run has neither ended nor is being ended."""
        job = self.jobs.get(run.job_id)
        return job is not None and job.state is JobState.RUNNING and self.ledger[run.job_id].run == run

    def is_under_way_of(self, job_id: int) -> bool:
        """Whether a job's present run has neither ended nor is being ended."""
        run = self.ledger[job_id].run
        return run is not None and self.is_under_way(run)

    def _watch_limit(self, run: Run) -> None:
        """Look again when the time limit is over; it may have been extended meanwhile."""
        job = self.jobs[run.job_id]
        due_s = job.start_s + job.time_limit_s
        self.time.at(due_s, lambda: self._over_limit(run))

    def _over_limit(self, run: Run) -> None:
        if not self.is_under_way(run):
            return
        job = self.jobs[run.job_id]
        if job.time_limit_s and self.now_s >= job.start_s + job.time_limit_s - 1e-6:
            self.ledger[run.job_id].ends_as = JobState.TIMEOUT
            self._end_soon(job)
        elif job.time_limit_s:
            self._watch_limit(run)

    # Ending

    def exit(self, run: Run, code: int) -> None:
        """End a run: its batch script has ended with a code."""
        book = self.ledger[run.job_id]
        if book.run != run:
            return
        if self.away:  # slurmd tells it once slurmctld is back
            self._late_exits.append(lambda: self.exit(run, code))
            return
        job = self.jobs[run.job_id]
        if job.state is JobState.RUNNING:
            book.ends_as = book.ends_as or (JobState.COMPLETED if code == 0 else JobState.FAILED)
            job = replace(job, state=JobState.COMPLETING, exit_code=code)
            self._put(job)
        self.time.after(self.site.delays.end_s, lambda: self._run_epilog(run))

    def _run_epilog(self, run: Run) -> None:
        if self.ledger[run.job_id].run == run:
            self.epilog(run, lambda: self._ended_run(run))

    def _end_soon(self, job: Job) -> None:
        """Send SIGTERM, and SIGKILL after KillWait."""
        book = self.ledger[job.job_id]
        run = book.run
        self._put(replace(job, state=JobState.COMPLETING))
        book.program.terminate()
        self.time.after(self.site.conf.kill_wait_s, lambda: self._kill(run))

    def _kill(self, run: Run | None) -> None:
        if run is not None and self.ledger[run.job_id].run == run:
            self.ledger[run.job_id].program.kill()
            self._run_epilog(run)

    def _ended_run(self, run: Run) -> None:
        """Free the resources of a run, and end or requeue its job."""
        book = self.ledger[run.job_id]
        if book.run != run:
            return
        if self.away:
            self._late_exits.append(lambda: self._ended_run(run))
            return
        for name, held in book.placed:
            self.free[name].give(held)
        book.placed, book.run, self._shown = (), None, None
        job = self.jobs[run.job_id]
        if book.goes_back:
            self._back_in_queue(job, held=book.goes_back == "held")
        else:
            self._final(replace(job, state=JobState(book.ends_as or JobState.FAILED), end_s=self.now_s))
        self.look_soon()  # freed resources are given out with the next tick

    def _back_in_queue(self, job: Job, *, held: bool) -> None:
        book = self.ledger[job.job_id]
        book.goes_back = book.ends_as = ""
        if held:
            book.holder = "muri" if book.by in {"muri", "member"} else "admin"
        back = replace(
            job, state=JobState.PENDING, nodes="", submit_s=self.now_s, start_s=0.0, exit_code=0,
            restart_count=job.restart_count + 1, begin_s=self.now_s + self.site.conf.cred_expire_s, held=held,
            reason=REQUEUED_HELD if held else "",
            priority=0 if held else job.priority or book.asked.priority,
        )  # fmt: skip
        self._put(back)
        self._tell("requeued", back)

    def _final(self, job: Job) -> None:
        self._put(job)
        self._ended.append((self.now_s, job.job_id))
        self._tell("ended", job)
        self.look_soon()  # others may depend on it

    def forget(self) -> None:
        """Forget what ended longer ago than MinJobAge."""
        while self._ended and self._ended[0][0] < self.now_s - self.site.conf.min_job_age_s:
            _, job_id = self._ended.popleft()
            job = self.jobs.pop(job_id, None)
            if job is not None:
                self._tell("forgotten", job)

    # Faults

    def fail_node(self, name: str) -> None:
        """Let a node fail: its jobs end, and go back to the queue where they may."""
        self.set_node(name, usable=False, state="DOWN")
        here = [job for job in self.jobs.values() if job.state in _ON_NODES and name in unfolded(job.nodes)]
        for job in sorted(here, key=lambda job: job.gpu_count > 0):  # members know nothing of the end of their runtime
            self.ledger[job.job_id].program.kill()
        for job in here:
            book = self.ledger[job.job_id]
            if not book.ends_as and not book.goes_back:
                book.goes_back = "queue" if job.can_requeue else ""
                book.ends_as, book.by = JobState.NODE_FAIL, "slurm"
            if book.run is not None:
                self._put(replace(self.jobs[job.job_id], state=JobState.COMPLETING))
                self._ended_run(book.run)

    def set_node(self, name: str, *, usable: bool, state: str) -> None:
        """Drain a node, or bring it back."""
        self.nodes[name] = replace(self.nodes[name], usable=usable, state=state)
        self._shown = None
        self.look_soon()

    def go_away(self) -> None:
        """Let slurmctld stop; jobs run on."""
        self.away = True

    def come_back(self) -> None:
        """Start slurmctld again: it hears of what has ended meanwhile."""
        self.away = False
        late, self._late_exits = self._late_exits, []
        for exit_now in late:
            exit_now()
        self.look_soon()

    def _tell(self, what: str, job: Job) -> None:
        for note in self.notes:
            note(what, job)


_ON_NODES: Final = frozenset({JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED})


def _place(job: Job) -> tuple[float, ...]:
    """Where a job stands in the queue; the record of an array's waiting tasks comes behind those with their own."""
    task = float("inf") if job.several_tasks or not job.array_tasks else int(job.array_tasks)
    return -job.priority, job.submit_s, job.array_job_id or job.job_id, task


def is_harmless(change: JobChange) -> bool:
    """Whether Slurm lets an administrator change that in a job that runs."""
    return replace(change, admin_comment=None, time_limit_s=None, licenses=None, name=None) == JobChange()


def changed_fields(job: Job, change: JobChange, now_s: float) -> dict[str, Any]:
    """The fields of a job's record that a change sets."""
    names = (
        "required_nodes", "cpu_count", "cpus_per_task", "dependency", "admin_comment", "licenses", "nice",
        "name",
    )  # fmt: skip
    fields = {name: getattr(change, name) for name in names if getattr(change, name) is not None}
    if change.nice is not None and not job.held:
        fields["priority"] = max(1, job.priority + job.nice - change.nice)
    if change.time_limit_s is not None:
        fields["time_limit_s"] = 60 * whole_minutes(change.time_limit_s)
    if change.mem_per_node_mib is not None:
        fields |= {"mem_per_node_mib": change.mem_per_node_mib, "mem_per_cpu_mib": 0}
    if change.mem_per_cpu_mib is not None:
        cpus = fields.get("cpu_count", job.cpu_count)
        mib = change.mem_per_cpu_mib * cpus // max(1, job.node_count)
        fields |= {"mem_per_node_mib": mib, "mem_per_cpu_mib": change.mem_per_cpu_mib}
    if change.gpu_request is not None:
        count = gpus_in(change.gpu_request)
        fields |= {"gpu_request": change.gpu_request, "gpu_count": count * max(1, job.node_count)}
    if change.oversubscribe:  # Slurm has no way back to its default
        fields["oversubscribe"] = True
    if change.start_now:
        fields["begin_s"] = now_s + _START_AGAIN_S if job.begin_s > now_s else 0.0
    return fields


def gpus_in(request: str) -> int:
    """GPUs per node in a request such as "gres/gpu:a100:2"."""
    for item in request.split(","):
        words = item.split(":")
        if words[0] == "gres/gpu":
            return int(words[-1]) if words[-1].isdigit() else 1
    return 0
