"""Programs in jobs, as models with measured delays: training scripts under `muri run`, pilots, dry runs.

They do the same as `muri.launcher.run`, `muri.slurm_plugin.node.pilot` and `muri.slurm_plugin.node.dry_run`.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from muri.group_spec import GroupSpec, read_group
from muri.profiler.records import STAGES
from muri.slurm_plugin.gateway.base import GatewayError, NoSuchJobError
from muri.slurm_plugin.node.pilot_watches import AWAITED, ENDED, FIRST_PAUSE_S
from muri.slurm_plugin.node.slurm_calls import growing_pauses
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import JobState, NewJob
from muri.slurm_plugin.records.comment_reports import comment_with, speeds_token, with_measured
from muri_lab.twin.clock import Event
from muri_lab.twin.records import NoProgram, Program, Run
from muri_lab.twin.sharing import Iteration, Sharing, speeds
from muri_lab.twin.site import Delays
from muri_lab.twin.slurm import VirtualSlurm

_ASK_AGAIN_S: Final = 10.0  # How long a member waits before it asks again while slurmctld is away
_ATTACH_TIMEOUT_S: Final = 120.0  # How long a member waits for its group's runtime (muri.launcher.job.environment)
_SURE_AFTER: Final = 12
"""A script whose iterations are all alike has warmed up after 2 of them, and is measured with 10 more."""

_TERMINATED: Final = 143


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a training script."""

    iteration: Iteration  # One iteration alone
    iterations: int  # How many it does
    exit_code: int = 0
    gpu_mem_gib: float = 0.0  # Its peak GPU memory
    uses_muri: bool = True  # Whether the batch script calls `muri run`


@dataclass(slots=True)
class _Attached:
    """A member at work in a runtime."""

    script: "TrainingScript"
    left: float
    speed: float = 1.0
    iterations: float = 0.0
    ended: bool = False

    def measured(self, now_s: float, *, in_turns: bool) -> dict[str, Any] | None:
        """What the runtime measures of its first iterations, as `muri.launcher.runtime.member_table` tells it."""
        if self.iterations < _SURE_AFTER or not in_turns:
            return None
        return {**_figures(self.script.work), "iterations": _SURE_AFTER - 2, "at": now_s}


class Runtime:
    """A group's runtime: members iterate at the speeds that the arbiter gives them."""

    def __init__(self, nodes: "NodeSide", pilot: Run, sharing: Sharing) -> None:
        self.pilot = pilot  # The placeholder's run
        self.members: dict[int, _Attached] = {}  # By job id, those that have ended included
        self._nodes = nodes
        self._sharing = sharing
        self._since_s = nodes.slurm.now_s
        self._next: Event | None = None
        self.on_idle: Callable[[], None] = lambda: None  # Is called when the last member at work has ended

    @property
    def at_work(self) -> dict[int, _Attached]:
        """Members that iterate."""
        return {job_id: member for job_id, member in self.members.items() if not member.ended}

    def attach(self, script: "TrainingScript") -> None:
        """Let a member begin."""
        self._pass_time()
        self.members[script.job_id] = _Attached(script, float(script.work.iterations))
        self._change_speeds()

    def detach(self, job_id: int) -> None:
        """Let a member end, finished or not."""
        member = self.members.get(job_id)
        if member is not None and not member.ended:
            self._pass_time()
            member.ended = True
            self._change_speeds()

    def end(self) -> None:
        """Be gone: every member at work loses it."""
        self._pass_time()
        if self._next is not None:
            self._next.call_off()
        at_work = self.at_work
        for member in at_work.values():
            member.ended = True
        for member in at_work.values():
            member.script.lose_runtime()

    def _pass_time(self) -> None:
        """Bring progress up to now."""
        now_s = self._nodes.slurm.now_s
        for member in self.at_work.values():
            iteration = member.script.work.iteration
            done = min(member.left, (now_s - self._since_s) * member.speed / iteration.iteration_s)
            member.left, member.iterations = member.left - done, member.iterations + done
        self._since_s = now_s

    def _change_speeds(self) -> None:
        if self._next is not None:
            self._next.call_off()
            self._next = None
        at_work = self.at_work
        if not at_work:
            self.on_idle()
            return
        found = speeds({job_id: member.script.work.iteration for job_id, member in at_work.items()}, self._sharing)
        left_s: list[tuple[float, int]] = []
        for job_id, member in at_work.items():
            member.speed = max(found[job_id], 1e-6)
            left_s.append((member.left * member.script.work.iteration.iteration_s / member.speed, job_id))
        first_s, first = min(left_s)
        self._next = self._nodes.slurm.time.after(first_s, lambda: self._finish(first))

    def _finish(self, job_id: int) -> None:
        self._next = None
        self._pass_time()
        member = self.members[job_id]
        member.ended, member.left = True, 0.0
        self._change_speeds()
        member.script.finish()

    def status(self) -> dict[str, Any]:
        """What the runtime's status file says."""
        self._pass_time()
        told, now_s, in_turns = {}, self._nodes.slurm.now_s, self._sharing.discipline != "plain"
        for job_id, member in self.members.items():
            iteration = member.script.work.iteration
            iteration_s = iteration.iteration_s / member.speed
            wait_s = max(0.0, iteration_s - iteration.iteration_s) / len(STAGES)
            told[str(job_id)] = {
                "state": "ended" if member.ended else "running",
                "iterations": int(member.iterations),
                "iterations_per_s": 1 / iteration_s if member.iterations >= 1 else 0.0,
                "stage_s": dict(zip(STAGES, iteration.stage_s, strict=True)),
                "wait_s": dict.fromkeys(STAGES, wait_s),
                "measured": member.measured(now_s, in_turns=in_turns),
            }
        return {"members": told, "discipline": self._sharing.discipline}


class NodeSide:
    """All that runs on the compute nodes."""

    def __init__(self, slurm: VirtualSlurm, sharing: Sharing) -> None:
        self.slurm = slurm  # The cluster
        self.sharing = sharing  # How members share
        self.runtimes: dict[int, Runtime] = {}  # Those that take members, by placeholder job
        self.muri_installed = True  # Whether job_submit knows `--muri`
        self.starting: Counter[Literal["member", "alone"]] = Counter()  # ranks of members, jobs alone
        self.on_training: Callable[[str, TrainingScript], None] = lambda what, script: None  # called at begin and end
        self._looking: dict[int, list[Callable[[], None]]] = {}
        self._pilots: dict[int, Placeholder] = {}

    @property
    def delays(self) -> Delays:
        """How long things take."""
        return self.slurm.site.delays

    def program_of(self, job: NewJob) -> Program:
        """The program of a job that the controller submits, by the command in its script."""
        words = shlex.split(job.script.splitlines()[1])
        if "muri.slurm_plugin.node.pilot" in words:
            return Placeholder(self, read_group(words[words.index("--group") + 1]))
        if "muri.slurm_plugin.node.dry_run" in words:
            target, token = (words[words.index(option) + 1] for option in ("--target", "--token"))
            return DryRun(self, int(target), token)
        return NoProgram()

    def look_for(self, pilot: int, found: Callable[[], None]) -> None:
        """Call back once a placeholder's runtime takes members; at once if it does."""
        if pilot in self.runtimes:
            found()
        else:
            self._looking.setdefault(pilot, []).append(found)

    def up(self, runtime: Runtime, placeholder: "Placeholder") -> None:
        """A runtime takes members from now on."""
        self.runtimes[runtime.pilot.job_id] = runtime
        self._pilots[runtime.pilot.job_id] = placeholder
        for found in self._looking.pop(runtime.pilot.job_id, []):
            found()

    def down(self, runtime: Runtime) -> None:
        """A runtime is gone."""
        if self.runtimes.pop(runtime.pilot.job_id, None) is not None:
            self._pilots.pop(runtime.pilot.job_id, None)
            runtime.end()

    def report(self) -> None:
        """Write what placeholders report into their comments, as of their last report."""
        for pilot, placeholder in list(self._pilots.items()):
            if pilot in self.slurm.jobs:
                placeholder.report()


class TrainingScript:
    """A user's batch script: `muri run train.py`, or `python train.py` where Muri is not used."""

    def __init__(self, nodes: NodeSide, work: Work) -> None:
        self.work = work
        self.job_id = 0  # Its job; 0 before its first start
        self._nodes = nodes
        self._run: Run | None = None
        self._events: list[Event] = []
        self._runtime: Runtime | None = None
        self._stopped = False
        self._leaving = False
        self._alone_end: Event | None = None

    @property
    def trains(self) -> bool:
        """Whether it iterates now, alone or in a group."""
        return self._run is not None and (self._runtime is not None or bool(self._alone_end))

    @property
    def runtime(self) -> Runtime | None:
        """The runtime in which it iterates, None where it does not or runs alone."""
        return self._runtime

    @property
    def _ranks(self) -> int:
        return max(1, self._nodes.slurm.ledger[self.job_id].asked.gpu_count)

    @property
    def _srun_s(self) -> float:
        """Ranks are started by srun."""
        return self._nodes.delays.srun_s if self._ranks > 1 else 0.0

    def start(self, run: Run) -> None:
        """Begin: find out whether the job is in a group."""
        self.job_id, self._run = run.job_id, run
        self._events, self._runtime, self._alone_end = [], None, None
        self._stopped = self._leaving = False
        if self.work.uses_muri:
            self._find_out()
        else:
            self._train_alone()

    def _later(self, delay_s: float, act: Callable[[], None]) -> Event:
        """Do something later in this run."""
        run = self._run

        def unless_over() -> None:
            if self._run is run and not self._stopped:
                act()

        event = self._nodes.slurm.time.after(delay_s, unless_over)
        self._events.append(event)
        return event

    def _find_out(self) -> None:
        """As `SlurmMembership.await_place`."""
        slurm = self._nodes.slurm
        if slurm.away:
            self._later(_ASK_AGAIN_S, self._find_out)
            return
        job = slurm.jobs.get(self.job_id)
        comment = "" if job is None else job.admin_comment
        delays = self._nodes.delays
        if not tags.is_member(comment):
            cores, alone_s = max(1, slurm.site.visible_cpus), delays.run_s + self._srun_s
            self._start_in_crowd(
                "alone", 1, lambda jobs: alone_s + delays.crowd_alone_s * max(0, jobs - cores), self._train_alone
            )
            return
        state = tags.parse_state(comment)
        timeout = self._later(_ATTACH_TIMEOUT_S, self._go_back)
        if state is not None:
            run, pilot, imports_s = self._run, state.pilot, self._srun_s + delays.join_s - delays.attach_s
            self._start_in_crowd(
                "member", self._ranks, lambda ranks: imports_s + delays.crowd_s * (ranks - 1),
                lambda: self._nodes.look_for(pilot, lambda: self._attach(run, pilot, timeout)),
            )  # fmt: skip

    def _start_in_crowd(
        self, way: Literal["member", "alone"], count: int, delay_s: Callable[[int], float], act: Callable[[], None]
    ) -> None:
        """Do something after a delay that grows with how many start in the same way at this moment."""
        starting, time = self._nodes.starting, self._nodes.slurm.time
        starting[way] += count

        def begin() -> None:
            seconds = delay_s(starting[way])
            time.after(seconds, lambda: starting.subtract({way: count}))
            self._later(seconds, act)

        time.after(0.0, begin)

    def _attach(self, run: Run | None, pilot: int, timeout: Event) -> None:
        if self._run is not run or self._stopped or self._leaving:
            return
        timeout.call_off()
        runtime, delays = self._nodes.runtimes.get(pilot), self._nodes.delays
        at_work = delays.busy_s if runtime is not None and runtime.at_work else 0.0
        self._later(delays.attach_s + at_work, lambda: self._join(pilot))

    def _join(self, pilot: int) -> None:
        runtime = self._nodes.runtimes.get(pilot)
        if runtime is None:
            self._go_back()
            return
        self._runtime = runtime
        self._nodes.on_training("begun", self)
        runtime.attach(self)

    def _train_alone(self) -> None:
        self._nodes.on_training("begun", self)
        seconds = self.work.iterations * self.work.iteration.iteration_s
        self._alone_end = self._later(seconds, self._end_alone)

    def _end_alone(self) -> None:
        self._alone_end = None
        self._nodes.on_training("done", self)
        self._exit(self.work.exit_code, 0.01)

    def finish(self) -> None:
        """Training in a group has come to its end."""
        self._runtime = None
        self._nodes.on_training("done", self)
        self._exit(self.work.exit_code, self._nodes.delays.leave_s)

    def lose_runtime(self) -> None:
        """The group's runtime is gone."""
        self._runtime = None
        if not self._stopped:
            self._go_back()

    def _go_back(self) -> None:
        """As `SlurmMembership.requeue`: back to the queue, behind the gate; it asks until slurmctld answers."""
        self._leaving = True
        slurm = self._nodes.slurm
        if slurm.away:
            self._later(_ASK_AGAIN_S, self._go_back)
            return
        job = slurm.jobs.get(self.job_id)
        if job is None or job.state is not JobState.RUNNING:
            return
        held = tags.token(job.admin_comment, tags.GATE_PREFIX) != tags.LICENSE_GATE
        try:
            slurm.requeue(self.job_id, "member", held=held)
        except NoSuchJobError:
            return
        except GatewayError:
            self._exit(1, 0.0)

    def _exit(self, code: int, delay_s: float) -> None:
        run = self._run
        if run is not None:
            self._later(delay_s, lambda: self._nodes.slurm.exit(run, code))

    def terminate(self) -> None:
        """Stop after a moment; a member leaves its group."""
        run = self._run
        if run is None or self._stopped:
            return
        self._leave()
        self._nodes.slurm.time.after(self._nodes.delays.stop_s, lambda: self._nodes.slurm.exit(run, _TERMINATED))

    def kill(self) -> None:
        """Be gone at once."""
        self._leave()

    def crash(self) -> None:
        """Let the script's processes end by themselves, as after a fault of their own."""
        run = self._run
        if run is None or self._stopped:
            return
        self._leave()
        self._nodes.slurm.exit(run, 137)

    def _leave(self) -> None:
        self._stopped = True
        for event in self._events:
            event.call_off()
        self._alone_end = None
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            runtime.detach(self.job_id)


class Placeholder:
    """The batch script of a group's placeholder job."""

    def __init__(self, nodes: NodeSide, group: GroupSpec) -> None:
        self.group = group
        self._nodes = nodes
        self._run: Run | None = None
        self._runtime: Runtime | None = None
        self._begun_s = 0.0
        self._reported = -1
        self._measured: set[str] = set()
        self._pauses: Iterator[float] = iter(())
        self._over = False
        self._next_poll: Event | None = None

    @property
    def served(self) -> tuple[str, ...]:
        """Job ids of all members that have been at work in its runtime."""
        return () if self._runtime is None else tuple(map(str, self._runtime.members))

    def start(self, run: Run) -> None:
        """Start the runtime, and watch over its members."""
        self._run, self._begun_s = run, self._nodes.slurm.now_s
        cpus, most = self._nodes.slurm.jobs[run.job_id].cpus_per_task, self._nodes.slurm.site.visible_cpus
        cpus = max(1, min(cpus, most or cpus))
        sharing = replace(self._nodes.sharing, discipline=self.group.discipline, cpus=cpus)
        self._runtime = Runtime(self._nodes, run, sharing)
        self._nodes.slurm.time.after(self._nodes.delays.pilot_s, self._take_members)

    def _take_members(self) -> None:
        if not self._over and self._runtime is not None:
            self._runtime.on_idle = self._poll_soon
            self._nodes.up(self._runtime, self)
            self._begin_pauses(AWAITED)
            self._poll_later()

    def _begin_pauses(self, phase: str) -> None:
        pilot = 0 if self._run is None else self._run.job_id
        self._pauses = growing_pauses(FIRST_PAUSE_S[phase], self.group.poll_s, pilot)

    def _poll_soon(self) -> None:
        self._begin_pauses(ENDED)
        self._poll_after(self._nodes.delays.notice_s)

    def _poll_after(self, seconds: float) -> None:
        if self._next_poll is not None:
            self._next_poll.call_off()
        self._next_poll = self._nodes.slurm.time.after(seconds, self._poll)

    def _poll_later(self) -> None:
        self._poll_after(next(self._pauses))

    def _poll(self) -> None:
        """As `MemberWatch.is_over`."""
        if self._over or self._run is None or self._runtime is None:
            return
        if self._runtime.at_work:  # a poll while members run changes nothing; the end of the last one asks for the next
            self._next_poll = None
            return
        if self._nodes.slurm.away:
            self._poll_later()
            return
        late = self._nodes.slurm.now_s - self._begun_s > self.group.attach_timeout_s
        present = self._present(late=late)
        if not present or (late and all(state is JobState.PENDING for state in present.values())):
            self._end(0)
        else:
            self._poll_later()

    def _present(self, *, late: bool) -> dict[int, JobState]:
        """As `MemberWatch._nobody_left`."""
        slurm, run = self._nodes.slurm, self._run
        known = dict.fromkeys(int(member) for member in self.group.ids)
        own = slurm.jobs.get(run.job_id) if run is not None else None
        tag = tags.parse_pilot(own.admin_comment) if own is not None else None
        known |= dict.fromkeys(tag.members if tag is not None else ())
        states = {job_id: slurm.jobs[job_id].state for job_id in known if job_id in slurm.jobs}
        states = {job_id: state for job_id, state in states.items() if state.is_active}
        members = self._runtime.members if self._runtime is not None else {}
        due = {job_id for job_id in states if late or (job_id in members and members[job_id].ended)}
        return {job_id: state for job_id, state in states.items() if job_id not in due or self._serves(job_id)}

    def _serves(self, job_id: int) -> bool:
        state = tags.parse_state(self._nodes.slurm.jobs[job_id].admin_comment)
        return state is not None and self._run is not None and state.pilot == self._run.job_id

    def report(self) -> None:
        """Tell in comments: the speeds as of the last report, and at once which members are measured."""
        if self._run is None or self._runtime is None:
            return
        status = self._runtime.status()
        number = int((self._nodes.slurm.now_s - self._begun_s) / self.group.telemetry_s)
        if number != self._reported:
            self._reported = number
            at_work = [name for name, each in status["members"].items() if each["state"] == "running"]
            token = speeds_token(status, at_work)  # these speeds are of this moment
            if token is not None:
                self._nodes.slurm.set_comment(self._run.job_id, token)
        for job_id, member in status["members"].items():
            if member["measured"] is not None and job_id not in self._measured:
                self._report_measured(job_id, member["measured"])

    def _report_measured(self, job_id: str, found: dict[str, Any]) -> None:
        """As `GroupReports._tell_measured`."""
        self._measured.add(job_id)
        job = self._nodes.slurm.jobs.get(int(job_id))
        if job is not None:
            self._nodes.slurm.set_comment(job.job_id, with_measured(job.comment, found))

    def _end(self, code: int) -> None:
        self._over = True
        if self._runtime is not None:
            self._nodes.down(self._runtime)
        if self._run is not None:
            run = self._run
            self._nodes.slurm.time.after(self._nodes.delays.stop_s, lambda: self._nodes.slurm.exit(run, code))

    def terminate(self) -> None:
        """End the runtime: its members go back to the queue."""
        if not self._over:
            self._end(1)

    def crash(self) -> None:
        """Let the runtime end by itself: the placeholder ends, too."""
        self.terminate()

    def kill(self) -> None:
        """Be gone at once, the runtime too."""
        self._over = True
        if self._runtime is not None:
            self._nodes.down(self._runtime)


def _figures(work: Work) -> dict[str, Any]:
    """Return a script's measured figures."""
    stages = dict(zip((f"{stage}_s" for stage in STAGES), work.iteration.stage_s, strict=True))
    about = {"iteration_s": work.iteration.iteration_s, "gpu_mem_gib": work.gpu_mem_gib}
    return {**stages, **about, "detail": {"confidence": 0.98}}


@dataclass(slots=True)
class DryRun:
    """The batch script of a dry run."""

    nodes: NodeSide
    target: int  # The job whose script it runs
    token: str  # The dry run's name
    run: Run | None = None
    over: bool = False

    def start(self, run: Run) -> None:
        """Measure for a while, then tell."""
        self.run = run
        self.nodes.slurm.time.after(self._seconds(), self._tell)

    def _seconds(self) -> float:
        work = self._work()
        return self.nodes.delays.dry_run_s + (0.0 if work is None else min(20.0, 25 * work.iteration.iteration_s))

    def _work(self) -> Work | None:
        book = self.nodes.slurm.ledger.get(self.target)
        return book.program.work if book is not None and isinstance(book.program, TrainingScript) else None

    def _tell(self) -> None:
        if self.over or self.run is None:
            return
        work = self._work()
        if self.nodes.slurm.away:
            self.nodes.slurm.time.after(_ASK_AGAIN_S, self._tell)
            return
        result: dict[str, Any] = {"error": "the script cannot be read"}
        if work is not None:
            result = {**_figures(work), "iterations": 20}
        job = self.nodes.slurm.jobs.get(self.run.job_id)
        if job is not None and job.state is JobState.RUNNING:
            self.nodes.slurm.set_comment(self.run.job_id, comment_with(job.comment, self.token, result))
            self.nodes.slurm.exit(self.run, 0)

    def terminate(self) -> None:
        """Stop; nothing is told."""
        self.over = True
        run = self.run
        if run is not None:
            self.nodes.slurm.time.after(self.nodes.delays.stop_s, lambda: self.nodes.slurm.exit(run, _TERMINATED))

    def kill(self) -> None:
        """Be gone at once."""
        self.over = True
