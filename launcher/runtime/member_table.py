"""The runtime's members: sessions, speed against running alone, what is measured in place, and the status file.

A new model is measured over its first iterations while it trains, by the rules of `muri.profiler.dryrun.course`.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from muri.clock import now_text
from muri.files import atomic_json
from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.sessions.setup import MemberSession
from muri.launcher.threads import SharedProcess
from muri.profiler.dryrun.course import LiveCourse
from muri.profiler.dryrun.steadiness import LoaderAhead
from muri.profiler.records import RESOURCES, STAGES, ProfileDetail, ProfileError

logger = logging.getLogger("muri.launcher")

WINDOW_S: Final = 30.0
LEAST_ITERATIONS: Final = 20
"""The rate counts the iterations of this last stretch; with fewer it comes from the lengths of the last iterations."""

MOST_TURNS_S: Final = 600.0
"""So long a measurement may keep members in turns; one that is unsure by then goes on whenever it is undisturbed."""

_MOST_WAITING: Final = 10_000
"""Iterations that are kept until the script's process has told its facts; of more, the first ones are warm-up."""

TOLERANCE: Final = 0.02
"""How far below its minimum speed a member may be measured."""

PATIENCE_S: Final = 60.0
"""A minimum speed that was missed for so long cannot be kept; one that was kept for so long after that can be."""


@dataclass(slots=True)
class SpeedMeter:
    """Iterations per second of one session, from samples of its count: a stall lowers it at once."""

    _looks: deque[tuple[float, int]] = field(default_factory=deque)
    _changed_s: float = 0.0

    def look(self, now_s: float, iterations: int) -> None:
        """Note the count of iterations so far at a time of a monotonic clock."""
        if not self._looks or iterations != self._looks[-1][1]:
            self._changed_s = now_s
        self._looks.append((now_s, iterations))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()

    def per_s(self, records: Sequence[IterationRecord]) -> float | None:
        """Return the iterations per second, None before the first iteration ended; `records` are the last ones."""
        if not self._looks or not records:
            return None
        (since_s, before), (now_s, count) = self._looks[0], self._looks[-1]
        if count - before >= LEAST_ITERATIONS and now_s > since_s:
            return (count - before) / (now_s - since_s)
        total_s = sum(record.iteration_s for record in records)
        stalled_s = now_s - self._changed_s
        if stalled_s > 2 * total_s / len(records):
            total_s += stalled_s
        return len(records) / total_s if total_s > 0 else None


class Measurement:
    """The measurement of one session, whose clock tells only it of iterations, in any thread; one thread looks.

    `is_undisturbed` tells whether stages now take the time that they take alone. With `tells_early` the first means are
    told, sure or not: nothing better is known of the model. `now_s` gives seconds since the epoch.
    """

    def __init__(
        self,
        session: MemberSession,
        is_undisturbed: Callable[[], bool],
        *,
        tells_early: bool = False,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._session = session
        self._is_undisturbed = is_undisturbed
        self._tells_early = tells_early
        self._now_s = now_s
        self._fresh: deque[tuple[IterationRecord, bool]] = deque(maxlen=_MOST_WAITING)
        self._course: LiveCourse | None = None
        self._result: dict[str, Any] | None = None
        self._over = False
        self._begun_s = now_s()
        session.clock.on_record = self._take

    @property
    def needs_turns(self) -> bool:
        """Return whether members should take turns for it."""
        return not self._over and self._now_s() - self._begun_s < MOST_TURNS_S

    @property
    def is_awaited(self) -> bool:
        """Return whether its first means are due soon, and others may wait for them."""
        return self._tells_early and self._result is None and self.needs_turns and self._session.clock.iterations > 0

    def look(self, *, ended: bool = False) -> dict[str, Any] | None:
        """Return the figures of a profile as plain JSON values, or an error; None before.

        Told early they change once, when they are sure. Once the script has ended, those so far have to do.
        """
        if self._over:
            return self._result
        facts = self._session.facts()
        if facts is not None:
            self._catch_up(facts)
        course = self._course
        if ended or (course is not None and course.is_over):
            self._over, self._session.clock.on_record = True, None
            self._fresh.clear()
            self._result = (None if facts is None else self._sum_up(facts)) or self._result
            if self._result is None and self._session.exit_code == 0 and not self._session.lost:
                seen = self._session.clock.iterations
                text = f"Muri saw {seen} of its iterations, too few to measure it"
                self._result = {"error": text, "at": self._now_s()}
        elif facts is not None and course is not None and course.has_means and self._tells_early and not self._result:
            self._result = self._sum_up(facts)
        return self._result

    def _take(self, record: IterationRecord) -> None:
        self._fresh.append((record, self._is_undisturbed()))

    def _catch_up(self, facts: Mapping[str, Any]) -> None:
        ahead = LoaderAhead(int(facts.get("depth", 0)), max(1, int(facts.get("period", 1))))
        course = self._course or LiveCourse(ahead)
        while self._fresh and not course.is_over:
            record, undisturbed = self._fresh.popleft()
            if undisturbed:
                course.add(record.busy_s, record.stage_s)
            else:
                course = LiveCourse(ahead)
        self._course = course

    def _sum_up(self, facts: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            dangers = facts.get("dangers")
            detail = ProfileDetail(
                gradient_mib=facts.get("gradient_mib"), dangers=None if dangers is None else tuple(dangers)
            )
            gpu_mem_gib = float(facts.get("gpu_mem_gib") or 0.0)
            result = None if self._course is None else self._course.result(gpu_mem_gib, detail)
        except (ProfileError, OverflowError, TypeError, ValueError) as error:
            logger.warning("member %s: the measurement makes no sense: %s", self._session.member, error)
            return None
        if result is None:
            return None
        logger.info("member %s is measured: %s", self._session.member, result.stopped)
        accumulates = {"accumulates": True} if facts.get("accumulates") else {}
        request = self._session.request
        python = {"prefix": request.prefix, "executable": request.executable}
        return {**result.to_dict(), "at": self._now_s(), "python": python, **accumulates}


@dataclass(slots=True)
class PromiseWatch:
    """Compares a member's measured speed with its minimum speed, look by look; `broken`: it cannot be kept."""

    broken: bool = False
    _since_s: float | None = None

    def look(self, now_s: float, speed: float | None, promised: float) -> bool:
        """Note the measured speed, None where it is unknown, and the minimum, 0 for none; returns `broken`."""
        if speed is None or (speed < promised - TOLERANCE) == self.broken:
            self._since_s = None
            return self.broken
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= PATIENCE_S:
            self.broken, self._since_s = not self.broken, None
        return self.broken


@dataclass(slots=True)
class Member:
    """One member of the group."""

    spec: MemberSpec
    session: MemberSession | None = None  # the session that runs, or ran last
    state: str = "waiting"  # "waiting": has not come yet; "running"; "ended": its last script; another may follow
    sessions: int = 0  # so far, the running one included
    earlier_iterations: int = 0  # of the sessions that ended
    script: str = ""  # of the session
    meter: SpeedMeter = field(default_factory=SpeedMeter)
    promise: PromiseWatch = field(default_factory=PromiseWatch)
    measurement: Measurement | None = None
    had_company: bool = False  # another member has run beside the session

    @property
    def is_at_work(self) -> bool:
        """Return whether its script runs and is not paused."""
        return self.state == "running" and not (self.session is not None and self.session.paused)

    def status(self, *, alone: bool = False) -> dict[str, object]:
        """Return the member's part of the status file; alone, it can miss no minimum speed, which holds in a group."""
        session, expected = self.session, self.spec
        records = [] if session is None else list(session.clock.recent)
        count = len(records) or 1
        running = session.clock.iterations if session is not None and self.state == "running" else 0
        mean = [sum(record.stage_s[i] for record in records) / count for i in range(len(STAGES))]
        wait = [sum(record.wait_s[i] for record in records) / count for i in range(len(STAGES))]
        paused = session is not None and session.paused
        at_work = self.is_at_work
        if paused:
            self.meter = SpeedMeter()  # a pause is not a slowness
        elif at_work:
            self.meter.look(time.monotonic(), running)
        rate_per_s = self.meter.per_s(records) if at_work else None
        speed = speed_of(rate_per_s, records, expected.solo_iteration_s)
        return {
            "state": self.state,
            "paused": self.state == "running" and paused,
            "script": self.script,
            "sessions": self.sessions,
            "iterations": self.earlier_iterations + running,
            "iteration_s": None if session is None else session.clock.recent_iteration_s(),
            "iterations_per_s": rate_per_s,
            "solo_iteration_s": expected.solo_iteration_s,
            "speed": speed,
            "predicted_speed": expected.predicted_speed,
            "promised_speed": expected.min_speed or None,
            "promise_broken": self.promise.look(time.monotonic(), speed, 0.0 if alone else expected.min_speed),
            "share": shares_of(records) if at_work else {},
            "stage_s": dict(zip(STAGES, mean, strict=True)),
            "wait_s": dict(zip(STAGES, wait, strict=True)),
            "measured": self.measured(),
            "isolation": None if session is None else session.isolation,
            "script_pid": None if session is None or not at_work else session.script_pid,
            "checkpoint": session is not None and session.checkpointed,
            "exit_code": None if session is None or self.state == "running" else session.exit_code,
        }

    def measured(self) -> dict[str, Any] | None:
        """Return the figures of a profile, once there are any."""
        return None if self.measurement is None else self.measurement.look(ended=self.state == "ended")


class MemberTable:
    """The members of a planned group by job id; safe to use from several threads.

    `changed` is set whenever a session starts or ends; the waiting thread clears it.
    """

    def __init__(self, group: GroupSpec) -> None:
        self._members = {spec.job_id: Member(spec) for spec in group.members}
        self.discipline: Final = group.discipline
        self._arbiter: Arbiter  # `watch` sets it before any session begins
        self.threads: SharedProcess | None = None
        self._has_gpu = True
        self._broken: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self.changed = threading.Event()

    def __contains__(self, member: str) -> bool:
        """Whether the job is a member."""
        return member in self._members

    def watch(self, arbiter: Arbiter, *, has_gpu: bool = True, threads: SharedProcess | None = None) -> None:
        """Set the arbiter, whether there is a GPU, and what runs members as threads."""
        self._arbiter, self._has_gpu, self.threads = arbiter, has_gpu, threads

    def add(self, spec: MemberSpec) -> None:
        """Add a job that joins the group; it may be a member already."""
        with self._lock:
            self._members.setdefault(spec.job_id, Member(spec))
            self.changed.set()

    def spec_of(self, member: str) -> MemberSpec:
        """Return the plan's figures of a member."""
        return self._members[member].spec

    def look_at_promises(self) -> None:
        """Log which minimum speeds cannot be kept, and leave lockstep for fair because of one.

        Under lockstep all members do the same number of iterations, so none can go first. `auto` changes the discipline
        by itself. `plain` cannot be left: its members have no turns.
        """
        with self._lock:
            before = self._broken
            self._broken = frozenset(name for name, member in self._members.items() if member.promise.broken)
        arbiter = self._arbiter
        for member in sorted(self._broken - before):
            logger.warning(
                "member %s does not get the speed that it was promised, under %s: the group takes no more members",
                member, arbiter.discipline,
            )  # fmt: skip
        for member in sorted(before - self._broken):
            logger.info("member %s gets the speed that it was promised again", member)
        if self._broken and isinstance(arbiter, SwitchingArbiter) and arbiter.discipline == "lockstep":
            arbiter.switch("fair", f"lockstep breaks the promise to {', '.join(sorted(self._broken))}")

    def begin(self, session: MemberSession, script: str = "") -> bool:
        """Note that a session of a script starts; False when the member has one that runs."""
        with self._lock:
            member = self._members[session.member]
            if member.state == "running":
                return False
            others = [other for other in self._members.values() if other.state == "running"]
            for neighbor in (member, *others):
                neighbor.had_company = bool(others)
            member.session, member.state = session, "running"
            member.sessions += 1
            member.script = script
            member.meter, member.promise = SpeedMeter(), PromiseWatch()
            unknown = member.spec.solo_iteration_s is None
            member.measurement = Measurement(session, self._is_undisturbed, tells_early=unknown)
            self.changed.set()
        self._arbiter.set_measuring(session.member, measuring=unknown)
        return True

    def end_measurements(self) -> None:
        """Let members that are measured by now, or took too long, share as suits the group."""
        with self._lock:
            running = {name: member for name, member in self._members.items() if member.state == "running"}
            for member in running.values():
                member.measured()
            over = [name for name, m in running.items() if m.measurement is None or not m.measurement.needs_turns]
        for name in over:
            self._arbiter.set_measuring(name, measuring=False)

    @property
    def awaits_means(self) -> bool:
        """Return whether a script's first means are due soon, for which others may wait."""
        with self._lock:
            running = [member.measurement for member in self._members.values() if member.state == "running"]
        return any(measurement is not None and measurement.is_awaited for measurement in running)

    def had_company(self, session: MemberSession) -> bool:
        """Return whether another member ran beside a session, at its end or before: two may end for one cause."""
        with self._lock:
            return self._members[session.member].had_company

    def finish(self, session: MemberSession) -> None:
        """Note that the session ended."""
        with self._lock:
            member = self._members[session.member]
            if member.session is session and member.state == "running":
                member.state = "ended"
                member.earlier_iterations += session.clock.iterations
                self.changed.set()

    def _is_undisturbed(self) -> bool:
        """Return whether stages take the time that they take alone: members take turns, or one runs without a GPU.

        Without turns no member waits for the GPU at a stage's end.
        """
        if self._arbiter.takes_turns:
            return True
        return not self._has_gpu and sum(member.state == "running" for member in list(self._members.values())) == 1

    def measured_gpu_mem_gib(self) -> dict[str, float]:
        """Return the peak GPU memory of the members that are measured, by job id."""
        with self._lock:
            measured = {name: member.measured() or {} for name, member in self._members.items()}
        return {name: float(figures["gpu_mem_gib"]) for name, figures in measured.items() if "gpu_mem_gib" in figures}

    def running(self) -> list[MemberSession]:
        """Return the sessions under way."""
        with self._lock:
            return [m.session for m in self._members.values() if m.session is not None and m.state == "running"]

    def status(self) -> dict[str, object]:
        """Return the content of the status file."""
        with self._lock:
            alone = sum(member.is_at_work for member in self._members.values()) < 2
            members = {name: member.status(alone=alone) for name, member in self._members.items()}
        fault = None if self.threads is None else self.threads.faults.fault
        group: dict[str, object] = {} if fault is None else {"fault": fault}
        group |= {"pid": os.getpid(), "pilot_job": os.environ.get("SLURM_JOB_ID")}
        return group | group_status(self._arbiter, members)

    def write_status(self, path: Path) -> None:
        """Write the status file so that a reader sees all of it or none; the pilot job ends a runtime that does not."""
        try:
            atomic_json(path, self.status())
        except OSError:
            os.utime(path)  # no space is left, but the runtime lives
            raise


def speed_of(
    rate_per_s: float | None, records: Sequence[IterationRecord], solo_iteration_s: float | None
) -> float | None:
    """Return the normalized speed: iterations × iteration time alone / elapsed; 1 = as fast as alone.

    The last iterations' time without waits stands in for an unknown time alone.
    """
    if rate_per_s is None:
        return None
    if solo_iteration_s is None:
        solo_iteration_s = sum(record.busy_s for record in records) / len(records)
    return rate_per_s * solo_iteration_s


def shares_of(records: Sequence[IterationRecord]) -> dict[str, float]:
    """Return shares of the last iterations' time: one for each stage, "wait" for tokens, and "other"."""
    total_s = sum(record.iteration_s for record in records)
    if total_s <= 0:
        return {}
    held = {stage: sum(record.stage_s[i] for record in records) / total_s for i, stage in enumerate(STAGES)}
    wait = sum(sum(record.wait_s) for record in records) / total_s
    rest = max(0.0, 1.0 - wait - sum(held.values()))
    return {name: round(share, 4) for name, share in (held | {"wait": wait, "other": rest}).items()}


def group_status(arbiter: Arbiter, members: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return the status file's content without the runtime's identity."""
    speeds = [speed for member in members.values() if isinstance(speed := member["speed"], float)]
    shares = [share for member in members.values() if isinstance(share := member["share"], dict)]
    busy = [min(1.0, sum(share.get(stage, 0.0) for share in shares)) for stage in STAGES]
    return {
        "updated": now_text(),
        "discipline": arbiter.discipline,
        "disciplines": list(arbiter.history) if isinstance(arbiter, SwitchingArbiter) else [],
        "total_speed": sum(speeds) if speeds else None,
        "resources": {
            resource: {"holder": holder, "busy": round(share, 4)}
            for resource, holder, share in zip(RESOURCES, arbiter.holders(), busy, strict=True)
        },
        "members": members,
    }
