"""Programs in jobs, as models with measured delays: training scripts under `muri run`, pilots, dry runs.

They do the same as `muri.launcher.run`, `muri.slurm_plugin.node.pilot` and `muri.slurm_plugin.node.dry_run`.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
from muri_lab.twin.slurm import VirtualSlurm, unfolded

_ASK_AGAIN_S: Final = 10.0  # How long a member waits before it asks again while slurmctld is away
_ATTACH_TIMEOUT_S: Final = 120.0  # How long a member waits for its group's runtime (muri.launcher.job.environment)
_SURE_AFTER: Final = 12
"""A script whose iterations are all alike has warmed up after 2 of them, and is measured with 10 more."""

_TERMINATED: Final = 143
_KILLED: Final = 137

_MEMBERS_END_S: Final = 10.0  # How long a placeholder's epilog waits for its members' end before it kills them
_EPILOG_LOOKS_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a training script."""

    iteration: Iteration  # One iteration alone
    iterations: int  # How many it does
    exit_code: int = 0
    gpu_mem_gib: float = 0.0  # Its peak GPU memory
    uses_muri: bool = True  # Whether the batch script calls `muri run`
    stop_s: float | None = None  # How long it takes to end after SIGTERM, where that is not as usual


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

    def __init__(self, nodes: "NodeSide", pilot: Run, sharing: Sharing, *, threads: bool = False) -> None:
        self.pilot = pilot  # The placeholder's run
        self._threads = threads  # Whether members work in its process, on the placeholder's CPUs
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
        """Be gone: the gates of members at work open for good."""
        self._pass_time()
        if self._next is not None:
            self._next.call_off()
        at_work = self.at_work
        for member in at_work.values():
            member.ended = True
        for member in at_work.values():
            member.script.go_on_without_turns(member.left)

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
        on = [self.pilot.job_id] if self._threads else at_work
        sharing = replace(self._sharing, cpus=self._nodes.cpus_of(on))
        found = speeds({job_id: member.script.work.iteration for job_id, member in at_work.items()}, sharing)
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
        self.grants: dict[Run, dict[int, TrainingScript]] = {}  # Members with open GPUs, by the placeholder's run
        self._closed: set[Run] = set()
        self._looking: dict[int, list[Callable[[], None]]] = {}
        self._pilots: dict[int, Placeholder] = {}
        slurm.epilog = self.end_grants

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

    def open_gpus(self, script: "TrainingScript", pilot: int) -> Run | None:
        """Open a placeholder's GPUs for a member, as the SPANK plugin does; returns the run that has them.

        None where it does not: it is not there, is another user's, or is being ended.
        """
        own, job, book = self.slurm.jobs[script.job_id], self.slurm.jobs.get(pilot), self.slurm.ledger.get(pilot)
        run = book.run if book is not None else None
        if job is None or run is None or run in self._closed or job.uid != own.uid:
            return None
        if not set(unfolded(own.nodes)) <= set(unfolded(job.nodes)):
            return None
        self.grants.setdefault(run, {})[script.job_id] = script
        return run

    def close_gpus(self, script: "TrainingScript") -> None:
        """Take note that no process of a member is left."""
        for scripts in self.grants.values():
            scripts.pop(script.job_id, None)

    def end_grants(self, run: Run, done: Callable[[], None]) -> None:
        """As a job's epilog: members go back to the queue, and none of their processes outlives the job's GPUs."""
        self._closed.add(run)
        if not self.grants.get(run):
            self.grants.pop(run, None)
            done()
        elif self.slurm.away:
            self.slurm.time.after(_EPILOG_LOOKS_S, lambda: self.end_grants(run, done))
        else:
            for script in list(self.grants[run].values()):
                script.send_back()
            end_s = self.slurm.now_s + _MEMBERS_END_S
            self._await_members(run, end_s, done)

    def _await_members(self, run: Run, end_s: float, done: Callable[[], None]) -> None:
        left = self.grants.get(run)
        if left and self.slurm.now_s >= end_s:
            for script in list(left.values()):
                script.be_killed()
        if self.grants.get(run):
            self.slurm.time.after(_EPILOG_LOOKS_S, lambda: self._await_members(run, end_s, done))
        else:
            self.grants.pop(run, None)
            done()

    def cpus_of(self, members: Iterable[int]) -> int:
        """CPUs that jobs have together, on the node with the fewest; each has its own, or shares them."""
        cores: dict[str, int] = {}
        for job_id in members:
            for name, held in self.slurm.ledger[job_id].placed:
                cores[name] = cores.get(name, 0) | held.cores
        count, most = min((each.bit_count() for each in cores.values()), default=1), self.slurm.site.visible_cpus
        return max(1, min(count, most or count))

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
        self.grant: Run | None = None  # The script may open the GPUs of this pilot job
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
        """Begin, with the GPUs of a placeholder where the job's AdminComment says so."""
        self.job_id, self._run = run.job_id, run
        self._events, self._runtime, self._alone_end, self.grant = [], None, None, None
        self._stopped = self._leaving = False
        self._ask_for_gpus()

    def _ask_for_gpus(self) -> None:
        """As the SPANK plugin: it asks slurmctld about jobs that have given themselves to Muri."""
        slurm = self._nodes.slurm
        comment = slurm.jobs[self.job_id].admin_comment
        if slurm.away and tags.token(comment, tags.REQUEST_PREFIX) is not None:
            self._later(_ASK_AGAIN_S, self._ask_for_gpus)
            return
        pilot = tags.token(comment, tags.GRANT_PREFIX)
        if pilot is not None:
            self.grant = self._nodes.open_gpus(self, int(pilot) if pilot.isdecimal() else 0)
        if pilot is not None and self.grant is None:
            self._go_back()  # fails closed: the script is never run
        elif not self.work.uses_muri:
            self._train_alone()
        elif self.grant is not None:
            self._find_runtime(self.grant.job_id)
        else:
            self._find_out()

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
        """As `require_no_group`: a job without open GPUs runs alone, unless it is in a group."""
        slurm, delays = self._nodes.slurm, self._nodes.delays
        if slurm.away:
            self._later(_ASK_AGAIN_S, self._find_out)
            return
        job = slurm.jobs.get(self.job_id)
        if job is not None and tags.is_member(job.admin_comment):
            self._go_back()
            return
        cores, alone_s = max(1, slurm.site.visible_cpus), delays.run_s + self._srun_s
        self._start_in_crowd(
            "alone", 1, lambda jobs: alone_s + delays.crowd_alone_s * max(0, jobs - cores), self._train_alone
        )

    def _find_runtime(self, pilot: int) -> None:
        """As `wait_for_runtime`."""
        delays, run, timeout = self._nodes.delays, self._run, self._later(_ATTACH_TIMEOUT_S, self._go_back)
        imports_s = self._srun_s + delays.join_s - delays.attach_s
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

    def go_on_without_turns(self, iterations: float) -> None:
        """The group's runtime is gone; whatever else happens is for the placeholder, or its epilog, to see to."""
        self._runtime = None
        if not self._stopped:
            self._alone_end = self._later(iterations * self.work.iteration.iteration_s, self._end_alone)

    def _go_back(self) -> None:
        """As `SlurmMembership.requeue`: back to the queue, behind the gate; it asks until slurmctld answers."""
        self._leaving = True
        if self._nodes.slurm.away:
            self._later(_ASK_AGAIN_S, self._go_back)
        elif not self.send_back():
            self._exit(1, 0.0)

    def send_back(self) -> bool:
        """Put the job back into the queue; returns whether Slurm does, or is ending the job anyway."""
        slurm = self._nodes.slurm
        job = slurm.jobs.get(self.job_id)
        if job is None or job.state is not JobState.RUNNING:
            return True
        held = tags.token(job.admin_comment, tags.GATE_PREFIX) != tags.LICENSE_GATE
        try:
            slurm.requeue(self.job_id, "member", held=held)
        except NoSuchJobError:
            return True
        except GatewayError:
            return False
        return True

    def _exit(self, code: int, delay_s: float) -> None:
        run = self._run
        if run is not None:
            self._later(delay_s, lambda: self._has_ended(run, code))

    def _has_ended(self, run: Run, code: int) -> None:
        if self._run is run:
            self._gone()
            self._nodes.slurm.exit(run, code)

    def terminate(self) -> None:
        """Stop after a moment; a member leaves its group."""
        run = self._run
        if run is None or self._stopped:
            return
        self._leave()
        stop_s = self._nodes.delays.stop_s if self.work.stop_s is None else self.work.stop_s
        self._nodes.slurm.time.after(stop_s, lambda: self._has_ended(run, _TERMINATED))

    def kill(self) -> None:
        """Be gone at once."""
        self._leave()
        self._gone()

    def crash(self) -> None:
        """Let the script's processes end by themselves, as after a fault of their own."""
        if not self._stopped:
            self.be_killed()

    def be_killed(self) -> None:
        """Be gone at once: a placeholder's epilog has killed what was left."""
        run = self._run
        self.kill()
        if run is not None:
            self._nodes.slurm.exit(run, _KILLED)

    def _gone(self) -> None:
        """No process of it is left."""
        self._nodes.close_gpus(self)
        self.grant = None

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
        sharing = replace(self._nodes.sharing, discipline=self.group.discipline)
        self._runtime = Runtime(self._nodes, run, sharing, threads=bool(self.group.threads))
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
        slurm = self._nodes.slurm
        states = {job_id: slurm.jobs[job_id].state for job_id in self._known() if job_id in slurm.jobs}
        states = {job_id: state for job_id, state in states.items() if state.is_active}
        members = self._runtime.members if self._runtime is not None else {}
        due = {job_id for job_id in states if late or (job_id in members and members[job_id].ended)}
        return {job_id: state for job_id, state in states.items() if job_id not in due or self._serves(job_id)}

    def _known(self) -> dict[int, None]:
        """All members, in the order in which they came."""
        known = dict.fromkeys(int(member) for member in self.group.ids)
        own = self._nodes.slurm.jobs.get(self._run.job_id) if self._run is not None else None
        tag = tags.parse_pilot(own.admin_comment) if own is not None else None
        return known | dict.fromkeys(tag.members if tag is not None else ())

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

    def _put_back(self) -> None:
        """As `put_back`: members that run go back to the queue; the job's epilog sees to those that it cannot reach."""
        for job_id in self._known():
            job = self._nodes.slurm.jobs.get(job_id)
            if job is not None and job.state is JobState.RUNNING and self._serves(job_id):
                program = self._nodes.slurm.ledger[job_id].program
                if isinstance(program, TrainingScript) and not self._nodes.slurm.away:
                    program.send_back()

    def _end(self, code: int, *, by_slurm: bool = False) -> None:
        self._over = True
        if by_slurm:
            self._put_back()  # their scripts are saved while the runtime still serves them
        if self._runtime is not None:
            self._nodes.down(self._runtime)
        if code and not by_slurm:
            self._put_back()
        if self._run is not None:
            run = self._run
            self._nodes.slurm.time.after(self._nodes.delays.stop_s, lambda: self._nodes.slurm.exit(run, code))

    def terminate(self) -> None:
        """Slurm ends the placeholder: its members go back to the queue."""
        if not self._over:
            self._end(1, by_slurm=True)

    def crash(self) -> None:
        """Let the runtime end by itself: the placeholder ends, too."""
        if not self._over:
            self._end(1)

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
