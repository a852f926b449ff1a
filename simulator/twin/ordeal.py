"""A story told on a twin: its faults are injected, its invariants watched, until everything has ended."""

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from muri.errors import MuriError
from muri.simulator.twin.invariants import BrokenInvariantError, Watch
from muri.simulator.twin.programs import DryRun, Placeholder, TrainingScript
from muri.simulator.twin.story import JOB_FAULTS, Fault, Story
from muri.simulator.twin.twin import Twin, folder, heard, quiet
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.cycle import Controller
from muri.slurm_plugin.execute.drain import drain
from muri.slurm_plugin.gateway.base import GatewayError, SlurmUnreachableError
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Reservation, Snapshot, Unreadable
from muri.slurm_plugin.records.gate import without_gate
from muri.slurm_plugin.records.journal import JournalError
from muri.slurm_plugin.records.roles import Role, read_job

_CALM_AFTER_S: Final = 600.0
"""From then on nothing goes wrong any more."""

_TRY_AGAIN_S: Final = 11.0
"""A fault of jobs that finds none waits so long for one."""

_MOST_S: Final = 6 * 3600.0
"""By then everything must have ended."""

_PATIENCE_S: Final = 600.0
"""So long after the last job Muri's own jobs may stay."""


class Killed(BaseException):
    """The controller's process dies here: nothing after this line runs."""


@dataclass(slots=True)
class Outcome:
    """What came of a story.

    Attributes:
        broken: Which invariant did not hold, "" where all did.
        injected: How often each kind of fault was injected; one that found nothing to hit is not counted.
        cycles: Cycles of the controller.
    """

    broken: str = ""
    injected: Counter[str] = field(default_factory=Counter)
    cycles: int = 0


class Ordeal:
    """One story on one twin.

    Args:
        story: The story.
        place: A directory for the controller's files.
        tell: Is told what happens, with the time, for people.
    """

    def __init__(self, story: Story, place: Path, tell: Callable[[str], None] | None = None) -> None:
        self.story = story
        self.outcome = Outcome()
        self.twin = Twin(story.site, Config(**story.config), place)
        self.watch = Watch(self.twin, self.twin.config.grouping.max_wait_s)
        self._place = place
        self._heard = tell
        self._armed: list[Fault] = []
        self._arm_at: list[int] = []
        self._previous: Snapshot | None = None
        self._process: ExitStack | None = None
        self._controller: Controller | None = None
        self._away_until_s = 0.0
        self._removed = False
        self._between: list[Fault] | None = None
        self._within_second = False
        self._seconds = 0
        self._moved_aside = 0
        self._full_until_s = 0.0

    def _tell(self, text: str) -> None:
        if self._heard is not None:
            self._heard(f"{self.twin.time.now_s - self.twin.begun_s:8.1f} s  {text}")

    # The course of events

    def run(self) -> Outcome:
        """Tell the story to its end."""
        twin = self.twin
        twin.know(self.story.profiles)
        self.watch.begin()
        twin.gateway.around = self._around
        twin.submit(self.story.submissions)
        for fault in self.story.faults:
            twin.time.at(twin.begun_s + fault.at_s, lambda fault=fault: self._befall(fault))  # type: ignore[misc]
        twin.time.at(twin.begun_s + _CALM_AFTER_S, self._calm)
        if self._heard is not None:
            twin.slurm.notes.append(
                lambda what, job: self._tell(f"job {job.job_id} ({job.name}) {what}: {job.state} on {job.nodes or '-'}")
            )
        try:
            with quiet() if self._heard is None else heard(self._tell):
                self._go_on()
        except BrokenInvariantError as error:
            self.outcome.broken = str(error)
        finally:
            self._end_process()
        return self.outcome

    def _go_on(self) -> None:
        twin, end_s = self.twin, self.twin.begun_s + _MOST_S
        last_s = max((fault.at_s for fault in self.story.faults), default=0.0)
        while (twin.left or twin.time.now_s < twin.begun_s + last_s) and twin.time.now_s < end_s:
            self._turn()
        if twin.left:
            self.watch.left()
        patience_s = twin.time.now_s + _PATIENCE_S
        while twin.time.now_s < patience_s and self._own_left():
            self._turn()
        self.watch.at_end()

    def _turn(self) -> None:
        """A cycle, where there is a controller, and the time until the next one."""
        due_s = self.twin.time.now_s + self.twin.config.interval_s
        if not self._removed and self.twin.time.now_s >= self._away_until_s:
            self._between = []
            self._cycle()
            between, self._between = self._between, None
            for fault in between:
                self._befall(fault)
        self.twin.time.advance(max(due_s, self.twin.time.now_s))
        self.watch.after_turn()

    def _cycle(self) -> None:
        self.outcome.cycles += 1
        try:
            controller = self._opened()
            controller.cycle()
            self.watch.succeeded_s = self.twin.time.now_s
            if self.twin.config.gate_watch_s:
                self.twin.time.sleep(min(5.0, self.twin.config.gate_watch_s))
                controller.close_gates()
            if not self._armed:
                self.watch.after_cycle()
        except Killed:
            self._tell("the controller dies")
            self._end_process()
            self.watch.begin_anew()
        except JournalError as error:
            self._tell(f"the journal: {error}")
            self._mend_journal()
            self.watch.begin_anew()
        except MuriError as error:
            self._tell(f"cycle skipped: {error}")
            self.watch.begin_anew()
        except Exception as error:
            text = f"a cycle failed by a fault of Muri's own: {type(error).__name__}: {error}"
            raise BrokenInvariantError(text) from error

    def _opened(self) -> Controller:
        if self._controller is None:
            self._process = ExitStack()
            self._controller = self._process.enter_context(self.twin.controller())
        if self.twin.time.now_s < self._full_until_s:
            # Whoever opens the file anew finds no room either.
            self._controller._journal._connection.execute("PRAGMA query_only=1")
        return self._controller

    def _end_process(self) -> None:
        process, self._process, self._controller = self._process, None, None
        if process is not None:
            with contextlib.suppress(Exception):
                process.close()

    def _mend_journal(self) -> None:
        """What an administrator does who reads the error: more room, or the damaged file moved aside."""
        self._end_process()
        if self.twin.time.now_s < self._full_until_s:
            return
        path = self.twin.config.state_dir / "journal.db"
        try:
            with self.twin.controller():
                return
        except JournalError:
            self._moved_aside += 1
            for each in self.twin.config.state_dir.glob("journal.db*"):
                each.rename(each.with_name(f"aside{self._moved_aside}-{each.name}"))
            path.unlink(missing_ok=True)

    # Faults

    def _hit(self, fault: Fault, what: str = "") -> None:
        self.outcome.injected[fault.kind] += 1
        self._tell(f"FAULT {fault.kind}{': ' + what if what else ''}")

    def _befall(self, fault: Fault) -> None:
        """Let a fault happen, or arm it where it concerns the controller's next calls."""
        if self._removed:
            return
        if fault.kind in _AT_CALLS:
            self._armed.append(fault)
            self._arm_at.append(fault.which % 6)
            return
        if self._between is not None and fault.kind in _BETWEEN_CYCLES:
            self._between.append(fault)
            return
        act = _ACTS[fault.kind]
        try:
            what = act(self, fault)
        except GatewayError as error:
            self._tell(f"{fault.kind}: Slurm refuses: {error}")
            return
        if what:
            self._hit(fault, what)
        elif fault.kind in JOB_FAULTS and self.twin.time.now_s < self.twin.begun_s + _CALM_AFTER_S - _TRY_AGAIN_S:
            self.twin.time.after(_TRY_AGAIN_S, lambda: self._befall(fault))

    def _around(self, name: str, act: Callable[[], Any]) -> Any:
        """Make one of the controller's calls."""
        fault = self._due(name)
        if fault is None:
            return self._seen(name, act())
        self._hit(fault, f"at {name}")
        if fault.kind == "controller killed before a call":
            raise Killed
        if fault.kind == "call fails":
            raise _refusal(name)
        if fault.kind == "call times out":
            self.twin.time.sleep(30.0)
            raise SlurmUnreachableError(f"cannot {name}: Socket timed out on send/recv operation")
        if fault.kind == "second controller":
            self._second_controller()
            return self._seen(name, act())
        if fault.kind == "stale snapshot":
            fresh = act()
            return self._previous if self._previous is not None and name == "snapshot" else fresh
        result = self._seen(name, act())
        if fault.kind == "controller killed after a call":
            if name == "extend_lease":
                self.watch.succeeded_s = self.twin.time.now_s  # all that matters has been done
            raise Killed
        if fault.kind == "call takes effect and fails":
            if name == "extend_lease":
                self.watch.succeeded_s = self.twin.time.now_s
            raise SlurmUnreachableError(f"cannot {name}: Zero Bytes were transmitted or received")
        if fault.kind == "partial snapshot" and isinstance(result, Snapshot):
            return _partial(result, fault)
        if fault.kind == "controller told to stop":
            self.twin.stop.set()
            self.twin.time.at(self.twin.time.now_s + 20.0, self.twin.stop.clear)
        return result

    def _due(self, name: str) -> Fault | None:
        """The armed fault whose call has come."""
        if not self._armed or self._within_second:
            return None
        if self._arm_at[0] > 0:
            self._arm_at[0] -= 1
            return None
        fault = self._armed[0]
        if fault.kind in {"stale snapshot", "partial snapshot"} and name != "snapshot":
            return None
        del self._armed[0], self._arm_at[0]
        return fault

    def _seen(self, name: str, result: Any) -> Any:
        if name == "snapshot" and isinstance(result, Snapshot) and not self._within_second:
            self._previous = result
        return result

    def _second_controller(self) -> None:
        """Another host's controller, with files of its own, runs a cycle in the middle of this one's."""
        self._within_second = True
        self._seconds += 1
        config = self.twin.config
        other = self._place / f"second{self._seconds}"
        self.twin.config = config.model_copy(update={"state_dir": other / "state", "status_dir": other / "status"})
        try:
            self.twin.know(self.story.profiles)
            with self.twin.controller() as controller:
                controller.cycle()
            self.watch.succeeded_s = self.twin.time.now_s
        except MuriError as error:
            self._tell(f"the second controller: {error}")
        finally:
            self.twin.config = config
            self._within_second = False

    def _calm(self) -> None:
        """From now on nothing goes wrong; people take back their holds."""
        self._armed.clear()
        self._arm_at.clear()
        self.twin.gateway.clock_offset_s = 0.0
        slurm = self.twin.slurm
        if slurm.away:
            slurm.come_back()
        for name in slurm.nodes:
            slurm.set_node(name, usable=True, state="IDLE")
        slurm.reservations = ()
        self._help()
        self.watch.begin_anew()

    def _help(self) -> None:
        """Do what people do from now on: take back their holds, and look after jobs whose AdminComment was damaged.

        A hold without any tag looks like their own. What a member asked for is lost where neither its tag nor a journal
        tells it.
        """
        slurm, twin = self.twin.slurm, self.twin
        for job in list(slurm.jobs.values()):
            if slurm.ledger[job.job_id].holder in {"user", "admin"} and job.state is JobState.PENDING:
                slurm.release(job.job_id, "admin")
        for job_id in sorted(self.watch.tampered):
            job = slurm.jobs.get(job_id)
            if job is None or job.state is not JobState.PENDING:
                continue
            if job.held and read_job(job).role in {Role.USER_HELD, Role.OTHER} and job.gpu_count:
                slurm.release(job_id, "admin")
            forgotten = self._removed or self.watch.journal_lost or twin.time.now_s < self._away_until_s
            if forgotten and not job.gpu_count and tags.parse_state(job.admin_comment) is None:
                self.watch.of(job_id).cancelled = True
                slurm.cancel(job_id, "user")
        twin.time.after(300.0, self._help)

    def _own_left(self) -> bool:
        return bool(self.own_jobs(Role.PILOT) or self.own_jobs(Role.DRY_RUN))

    # Whom faults hit

    def users_jobs(self, *states: JobState) -> list[Job]:
        """Users' jobs in some states."""
        found = [self.twin.slurm.jobs.get(course.job_id) for course in self.twin.courses]
        return [job for job in found if job is not None and job.state in states]

    def own_jobs(self, role: Role) -> list[Job]:
        """Muri's own jobs of a kind that wait or run."""
        jobs = self.twin.slurm.jobs.values()
        return [job for job in jobs if job.state.is_active and read_job(job).role is role]


def _chosen(jobs: list[Job], fault: Fault) -> Job | None:
    return jobs[fault.which % len(jobs)] if jobs else None


def _refusal(name: str) -> GatewayError:
    return GatewayError(f"cannot {name}: Slurm temporarily unable to accept job, sleeping and retrying")


def _partial(snapshot: Snapshot, fault: Fault) -> Snapshot:
    """The same without some jobs, whose records could not be read."""
    lost = {job.job_id for job in snapshot.jobs if (job.job_id * 7919 + fault.which) % 3 == 0}
    unreadable = tuple(Unreadable(job_id, "its record is damaged") for job_id in sorted(lost))
    return replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.job_id not in lost), unreadable=unreadable)


# What faults do: each says what it hit, "" where there was nothing to hit.

_PENDING, _RUNNING = (JobState.PENDING,), (JobState.RUNNING,)


def _controller_away(ordeal: Ordeal, fault: Fault) -> str:
    ordeal._away_until_s = ordeal.twin.time.now_s + 120 + 480 * fault.amount
    ordeal._end_process()
    ordeal.watch.begin_anew()
    return f"until {ordeal._away_until_s - ordeal.twin.begun_s:.0f} s"


def _clock_step(ordeal: Ordeal, fault: Fault) -> str:
    gateway = ordeal.twin.gateway
    gateway.clock_offset_s = (fault.amount - 0.5) * 7200
    ordeal.twin.time.after(150.0, lambda: setattr(gateway, "clock_offset_s", 0.0))
    ordeal.watch.begin_anew()
    return f"{gateway.clock_offset_s:+.0f} s"


def _slurmctld_away(ordeal: Ordeal, fault: Fault) -> str:
    slurm = ordeal.twin.slurm
    if slurm.away:
        return ""
    long = fault.kind.endswith("long")
    seconds = 200 + 400 * fault.amount if long else 2 + 20 * fault.amount
    slurm.go_away()
    ordeal.twin.time.after(seconds, slurm.come_back)
    ordeal.watch.begin_anew()
    return f"for {seconds:.0f} s"


def _node(ordeal: Ordeal, fault: Fault) -> str:
    slurm = ordeal.twin.slurm
    name = sorted(slurm.nodes)[fault.which % len(slurm.nodes)]
    if slurm.away:
        return ""
    if fault.kind == "node failed":
        slurm.fail_node(name)
    else:
        slurm.set_node(name, usable=False, state="DRAIN")
    back = lambda: slurm.set_node(name, usable=True, state="IDLE")  # noqa: E731
    ordeal.twin.time.after(60 + 240 * fault.amount, back)
    return name


def _maintenance(ordeal: Ordeal, fault: Fault) -> str:
    slurm, now_s = ordeal.twin.slurm, ordeal.twin.time.now_s
    name = sorted(slurm.nodes)[fault.which % len(slurm.nodes)]
    slurm.reservations += (Reservation(f"maint{fault.which}", name, now_s + 30, now_s + 330, ("MAINT",)),)
    ordeal.twin.time.after(331, slurm.look_soon)
    return name


def _placeholder(ordeal: Ordeal, fault: Fault) -> str:
    pilot = _chosen(ordeal.own_jobs(Role.PILOT), fault)
    if pilot is None or ordeal.twin.slurm.away:
        return ""
    program = ordeal.twin.slurm.ledger[pilot.job_id].program
    if fault.kind == "placeholder cancelled":
        ordeal.twin.slurm.cancel(pilot.job_id, "user")
    elif pilot.state is not JobState.RUNNING:
        return ""
    elif fault.kind == "runtime killed" and isinstance(program, Placeholder):
        program.crash()
    else:
        program.kill()
        run = ordeal.twin.slurm.ledger[pilot.job_id].run
        if run is not None:
            ordeal.twin.slurm.exit(run, 137)
    return f"job {pilot.job_id}"


def _script(ordeal: Ordeal, fault: Fault) -> str:
    members = [
        job for job in ordeal.users_jobs(JobState.RUNNING)
        if fault.kind == "muri run killed" or tags.parse_state(job.admin_comment) is not None
    ]  # fmt: skip
    job = _chosen(members, fault)
    if job is None:
        return ""
    program = ordeal.twin.slurm.ledger[job.job_id].program
    if not isinstance(program, TrainingScript) or not ordeal.twin.slurm.is_under_way_of(job.job_id):
        return ""
    ordeal.watch.of(job.job_id).crashed = True
    program.crash()
    return f"job {job.job_id}"


def _dry_run(ordeal: Ordeal, fault: Fault) -> str:
    run = _chosen(ordeal.own_jobs(Role.DRY_RUN), fault)
    if run is None or run.state is not JobState.RUNNING or ordeal.twin.slurm.away:
        return ""
    program = ordeal.twin.slurm.ledger[run.job_id].program
    if isinstance(program, DryRun) and program.run is not None:
        program.kill()
        ordeal.twin.slurm.exit(program.run, 1)
    return f"job {run.job_id}"


def _user_acts(ordeal: Ordeal, fault: Fault) -> str:
    slurm = ordeal.twin.slurm
    if slurm.away:
        return ""
    kind = fault.kind
    if kind == "user cancels":
        job = _chosen(ordeal.users_jobs(JobState.PENDING, JobState.RUNNING), fault)
        if job is not None:
            ordeal.watch.of(job.job_id).cancelled = True
            slurm.cancel(job.job_id, "user")
    elif kind in {"user holds", "administrator holds"}:
        job = _chosen(ordeal.users_jobs(*_PENDING), fault)
        if job is not None:
            slurm.hold(job.job_id, "user" if kind == "user holds" else "admin")
    elif kind == "user releases":
        job = _chosen([job for job in ordeal.users_jobs(*_PENDING) if job.held], fault)
        if job is not None:
            slurm.release(job.job_id, "user")
    elif kind in {"user requeues", "administrator requeues and holds"}:
        # With holds for a gate nobody can tell this hold of a member from the one with which it puts itself back.
        told_apart = kind == "user requeues" or slurm.site.conf.gate != "hold"
        jobs = [job for job in ordeal.users_jobs(*_RUNNING) if job.can_requeue]
        jobs = [job for job in jobs if told_apart or tags.token(job.admin_comment, tags.STATE_PREFIX) is None]
        job = _chosen(jobs, fault)
        if job is not None:
            by = "user" if kind == "user requeues" else "admin"
            slurm.requeue(job.job_id, by, held=by == "admin")
    elif kind == "user forges comment":
        job = _chosen(ordeal.users_jobs(JobState.PENDING, JobState.RUNNING), fault)
        if job is not None:
            slurm.set_comment(job.job_id, _FORGED[fault.which % len(_FORGED)].replace("JOB", str(job.job_id)))
    else:
        return _request_changes(ordeal, fault)
    return f"job {job.job_id}" if job is not None else ""


_FORGED: Final = (
    'muri-out-of-memory:0.3 muri-stopped:0 muri-checkpoint:0',
    'muri-speed:{"JOB":{"n":1,"t":1e-9,"s":[1,1,1,1],"w":[0,0,0,0]}}',
    'muri-profile:{"token":"000000000001","load_s":9,"preprocess_s":9,"propagate_s":9,"synchronize_s":9,"iteration_s":36}',
    'muri-fault:{"cause":"x","culprits":[1,2,3,4]}',
    "muri-host:000000000001:1,2,3 muri-state:{}",
    "{" * 400,
)  # fmt: skip


def _request_changes(ordeal: Ordeal, fault: Fault) -> str:
    """A user or an administrator changes what a waiting job asks for. Members are left alone: Slurm shows their
    request as Muri has made it."""
    slurm = ordeal.twin.slurm
    jobs = [
        job for job in ordeal.users_jobs(*_PENDING)
        if tags.token(job.admin_comment, tags.STATE_PREFIX) is None
        and tags.token(job.admin_comment, tags.GIVEN_PREFIX) is None
    ]  # fmt: skip
    job = _chosen(jobs, fault)
    if job is None:
        return ""
    if fault.kind == "user takes licence off":
        if without_gate(job.licenses) == job.licenses:
            return ""
        slurm.update_by_owner(job.job_id, licenses=without_gate(job.licenses))
    elif fault.kind == "administrator changes limit" or fault.amount < 0.5:
        slurm.update_by_owner(job.job_id, time_limit_s=max(600, job.time_limit_s - 600))
    else:
        slurm.update_by_owner(job.job_id, cpus_per_task=1, cpu_count=max(1, job.gpu_count))
    return f"job {job.job_id}"


def _files(ordeal: Ordeal, fault: Fault) -> str:
    state = ordeal.twin.config.state_dir
    name = "profiles.db" if "store" in fault.kind else "journal.db"
    ordeal._end_process()
    paths = sorted(state.glob(f"{name}*"))
    if not paths:
        return ""
    for path in paths:
        if fault.kind.endswith("lost"):
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            cut = int(len(content) * fault.amount)
            content[cut : cut + 4096] = bytes((fault.which + index) % 251 for index in range(4096))
            path.write_bytes(bytes(content))
    ordeal.watch.journal_lost |= name == "journal.db"
    ordeal.watch.begin_anew()
    return name


def _disk_full(ordeal: Ordeal, fault: Fault) -> str:
    """Nothing can be written into the journal for a while, whoever opens it."""
    ordeal._full_until_s = min(
        ordeal.twin.time.now_s + 900 * fault.amount, ordeal.twin.begun_s + _CALM_AFTER_S
    )
    ordeal._end_process()
    ordeal.watch.begin_anew()
    return f"until {ordeal._full_until_s - ordeal.twin.begun_s:.0f} s"


def _truncated(ordeal: Ordeal, fault: Fault) -> str:
    job = _chosen([job for job in ordeal.users_jobs(JobState.PENDING, JobState.RUNNING) if job.admin_comment], fault)
    if job is None or ordeal.twin.slurm.away:
        return ""
    cut = int(len(job.admin_comment) * fault.amount)
    ordeal.watch.tampered.add(job.job_id)
    ordeal.watch.of(job.job_id).waiting_since_s = None
    ordeal.twin.slurm.set_admin_comment(job.job_id, job.admin_comment[:cut])
    return f"job {job.job_id} after {cut} characters"


def _drained(ordeal: Ordeal, fault: Fault) -> str:
    """`muri drain`, with or without the controller coming back afterwards."""
    ordeal._end_process()
    seconds = 300.0
    ordeal._away_until_s = ordeal.twin.time.now_s + seconds
    ordeal._removed = fault.kind == "removed"
    ordeal.watch.begin_anew()
    if ordeal._removed:
        ordeal.twin.nodes.muri_installed = False
    ordeal.twin.time.after(1.0, lambda: _drain_on(ordeal))
    return "for good" if ordeal._removed else f"for {seconds:.0f} s"


def _drain_on(ordeal: Ordeal) -> None:
    """As `drain_until_over`, until it is over or the controller is back."""
    again = True
    if not ordeal.twin.slurm.away:
        gateway = ordeal.twin.gateway.at_once()
        with contextlib.suppress(SlurmUnreachableError):
            again = not drain(gateway, gateway.queue).is_over
    if again and (ordeal._removed or ordeal.twin.time.now_s < ordeal._away_until_s):
        ordeal.twin.time.after(20.0, lambda: _drain_on(ordeal))


def _upgraded(ordeal: Ordeal, fault: Fault) -> str:
    """A new version with another policy; the configuration's gate may have changed, too."""
    ordeal._end_process()
    policy = ("muri-s", "muri-l", "muri-jct", "sjf-bsbf")[fault.which % 4]
    ordeal.twin.config = ordeal.twin.config.model_copy(update={"policy": policy})
    return policy


_AT_CALLS: Final = frozenset({
    "controller killed before a call", "controller killed after a call", "call fails", "call times out",
    "call takes effect and fails", "stale snapshot", "partial snapshot", "second controller", "controller told to stop",
})  # fmt: skip

_BETWEEN_CYCLES: Final = frozenset({
    "controller away for long", "journal lost", "journal damaged", "profile store lost", "profile store damaged",
    "disk full", "drained", "removed", "upgraded",
})  # fmt: skip
"""What happens to the controller's process or files while no cycle runs."""

_ACTS: Final[dict[str, Callable[[Ordeal, Fault], str]]] = {
    "controller away for long": _controller_away,
    "clock step": _clock_step,
    "slurmctld restarted": _slurmctld_away,
    "slurmctld away for long": _slurmctld_away,
    "node drained": _node,
    "node failed": _node,
    "maintenance reservation": _maintenance,
    "placeholder cancelled": _placeholder,
    "placeholder killed": _placeholder,
    "runtime killed": _placeholder,
    "member killed": _script,
    "muri run killed": _script,
    "dry run killed": _dry_run,
    **dict.fromkeys(
        ("user cancels", "user holds", "user releases", "user requeues", "user forges comment", "administrator holds",
         "administrator requeues and holds", "user changes request", "user takes licence off",
         "administrator changes limit"), _user_acts),
    **dict.fromkeys(("journal lost", "journal damaged", "profile store lost", "profile store damaged"), _files),
    "disk full": _disk_full,
    "AdminComment truncated": _truncated,
    "drained": _drained,
    "removed": _drained,
    "upgraded": _upgraded,
}  # fmt: skip


def endure(story: Story, tell: Callable[[str], None] | None = None) -> Outcome:
    """Tell a story on a twin of its own.

    Args:
        story: The story.
        tell: Is told what happens, with the time, for people.
    """
    with folder() as place:
        return Ordeal(story, place, tell).run()

