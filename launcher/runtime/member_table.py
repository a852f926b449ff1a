"""What the runtime knows of its members: sessions, speed against running alone, and the status file."""

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from muri.files import atomic_json
from muri.group_spec import GroupSpec, MemberSpec
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.job.session import MemberSession
from muri.launcher.job.stage_clock import IterationRecord
from muri.launcher.runtime.measuring import Measurement, PromiseWatch
from muri.launcher.threads import SharedProcess
from muri.profiler.records import RESOURCES, STAGES

WINDOW_S: Final = 30.0
"""Iterations of that last stretch are counted for the rate."""

LEAST_ITERATIONS: Final = 20
"""With fewer in the window, the rate comes from the lengths of the last iterations."""


@dataclass(slots=True)
class SpeedMeter:
    """Iterations per second of one session, from samples of its count.

    The rate of a session that stalls falls at once, although no iteration ends.
    """

    _looks: deque[tuple[float, int]] = field(default_factory=deque)
    _changed_s: float = 0.0

    def look(self, now_s: float, iterations: int) -> None:
        """Note the count of iterations.

        Args:
            now_s: A monotonic clock.
            iterations: Iterations of the session so far.
        """
        if not self._looks or iterations != self._looks[-1][1]:
            self._changed_s = now_s
        self._looks.append((now_s, iterations))
        while len(self._looks) > 2 and self._looks[1][0] <= now_s - WINDOW_S:
            self._looks.popleft()

    def per_s(self, records: Sequence[IterationRecord]) -> float | None:
        """Iterations per second; None before the first iteration ended.

        Args:
            records: The session's last iterations.
        """
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


@dataclass(slots=True)
class Member:
    """One member of the group.

    Attributes:
        spec: The plan's figures of it.
        session: The session that runs, or ran last.
        state: "waiting" (has not come yet), "running" or "ended" (its last script ended; it may
            come again with another).
        sessions: Sessions so far, the running one included.
        earlier_iterations: Iterations of the sessions that ended.
        script: What the session runs.
        started: When it started, UTC.
        meter: Its session's speed.
        promise: Whether it gets the speed that it was promised.
        measurement: What is measured of its session in place.
        had_company: Whether another member has been at work beside its session.
    """

    spec: MemberSpec
    session: MemberSession | None = None
    state: str = "waiting"
    sessions: int = 0
    earlier_iterations: int = 0
    script: str = ""
    started: str | None = None
    meter: SpeedMeter = field(default_factory=SpeedMeter)
    promise: PromiseWatch = field(default_factory=PromiseWatch)
    measurement: Measurement | None = None
    had_company: bool = False

    @property
    def is_at_work(self) -> bool:
        """Whether its script runs and is not paused."""
        return self.state == "running" and not (self.session is not None and self.session.paused)

    def status(self, *, alone: bool = False) -> dict[str, object]:
        """The member's part of the status file.

        Args:
            alone: Whether nobody else is at work: then nothing of what it was promised can be missed, for promises are
                of speeds beside others.
        """
        session, expected = self.session, self.spec
        records = [] if session is None else list(session.clock.recent)
        count = len(records)
        running = session.clock.iterations if session is not None and self.state == "running" else 0
        mean = [sum(record.stage_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        wait = [sum(record.wait_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        paused = session is not None and session.paused
        at_work = self.state == "running" and not paused
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
            "started": self.started,
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
            "gpu_mem_peak_gib": None if session is None else session.clock.gpu.gpu_mem_peak_gib,
            "isolation": None if session is None else session.isolation,
            "script_pid": (session.roots().process or None) if session is not None and at_work else None,
            "checkpoint": session is not None and session.checkpointed,
            "exit_code": None if session is None or self.state == "running" else session.exit_code,
        }

    @property
    def needs_turns(self) -> bool:
        """Whether the group should take turns while it is measured."""
        return self.measurement is not None and self.measurement.needs_turns

    def measured(self) -> dict[str, Any] | None:
        """The figures of a profile, once there are any."""
        return None if self.measurement is None else self.measurement.look(ended=self.state == "ended")


class MemberTable:
    """The members by job id; safe to use from several threads.

    Args:
        group: The group as it was planned.

    Attributes:
        discipline: The planned one.
        changed: Set whenever a session starts or ends; the waiting thread clears it.
    """

    def __init__(self, group: GroupSpec) -> None:
        self._members = {spec.job_id: Member(spec) for spec in group.members}
        self.discipline: Final = group.discipline
        self._started = utc_now()
        self._arbiter: Arbiter | None = None
        self._threads: SharedProcess | None = None
        self._has_gpu = True
        self._lock = threading.Lock()
        self.changed = threading.Event()

    def __contains__(self, member: str) -> bool:
        """Whether the job is a member."""
        return member in self._members

    def watch(self, arbiter: Arbiter, *, has_gpu: bool = True, threads: SharedProcess | None = None) -> None:
        """Set the arbiter, whether there is a GPU, and what runs members as threads."""
        self._arbiter, self._has_gpu, self._threads = arbiter, has_gpu, threads

    def add(self, spec: MemberSpec) -> None:
        """Add a job that joins the group; it may be a member already."""
        with self._lock:
            self._members.setdefault(spec.job_id, Member(spec))
            self.changed.set()

    def spec_of(self, member: str) -> MemberSpec:
        """The plan's figures of a member."""
        return self._members[member].spec

    def broken_promises(self) -> list[str]:
        """Members whose promise cannot be kept, as the last look has found."""
        with self._lock:
            return [name for name, member in self._members.items() if member.promise.broken]

    def begin(self, session: MemberSession, script: str = "") -> bool:
        """Note that a session of a script starts; False when the member has one that runs."""
        with self._lock:
            member = self._members[session.member]
            if member.state == "running":
                return False
            others = [each for each in self._members.values() if each.state == "running"]
            for each in (member, *others):
                each.had_company = bool(others)
            member.session, member.state = session, "running"
            member.sessions += 1
            member.script, member.started = script, utc_now()
            member.meter, member.promise = SpeedMeter(), PromiseWatch()
            unknown = member.spec.solo_iteration_s is None
            member.measurement = Measurement(session, self._is_undisturbed, tells_early=unknown)
            self.changed.set()
        if self._arbiter is not None:
            self._arbiter.set_measuring(session.member, measuring=unknown)
        return True

    def end_measurements(self) -> None:
        """Let members that are measured by now, or took too long, share as suits the group."""
        with self._lock:
            at_work = [(name, each) for name, each in self._members.items() if each.state == "running"]
            for _, each in at_work:
                each.measured()
            over = [name for name, each in at_work if not each.needs_turns]
        if self._arbiter is not None:
            for name in over:
                self._arbiter.set_measuring(name, measuring=False)

    @property
    def awaits_means(self) -> bool:
        """Whether a script's first means are due soon, for which others may wait."""
        with self._lock:
            at_work = [each.measurement for each in self._members.values() if each.state == "running"]
        return any(each is not None and each.is_awaited for each in at_work)

    def had_company(self, session: MemberSession) -> bool:
        """Whether another member has been at work beside a session, at its end or before: two may end for one cause."""
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
        """Whether stages take the time that they take alone: members take turns, or there is one, which needs no GPU.

        Without turns nobody waits for the GPU at a stage's end.
        """
        if self._arbiter is not None and self._arbiter.takes_turns:
            return True
        return not self._has_gpu and sum(member.state == "running" for member in list(self._members.values())) == 1

    def measured_gpu_mem_gib(self) -> dict[str, float]:
        """Peak GPU memory of the members that are measured, by job id."""
        with self._lock:
            found = {name: member.measured() or {} for name, member in self._members.items()}
        return {name: float(figures["gpu_mem_gib"]) for name, figures in found.items() if "gpu_mem_gib" in figures}

    def running(self) -> list[MemberSession]:
        """The sessions under way."""
        with self._lock:
            return [m.session for m in self._members.values() if m.session is not None and m.state == "running"]

    def status(self) -> dict[str, object]:
        """Content of the status file."""
        with self._lock:
            alone = sum(member.is_at_work for member in self._members.values()) < 2
            members = {name: member.status(alone=alone) for name, member in self._members.items()}
        fault = None if self._threads is None else self._threads.fault()
        group: dict[str, object] = {} if fault is None else {"fault": fault}
        group |= {"pid": os.getpid(), "pilot_job": os.environ.get("SLURM_JOB_ID"), "started": self._started}
        return group | group_status(self._arbiter, self.discipline, members)

    def write_status(self, path: Path) -> None:
        """Write the status file so that a reader sees all of it or none."""
        atomic_json(path, self.status())


def speed_of(
    rate_per_s: float | None, records: Sequence[IterationRecord], solo_iteration_s: float | None
) -> float | None:
    """Normalized speed: iterations × iteration time alone / elapsed; 1 = as fast as alone.

    Args:
        rate_per_s: Iterations per second, None when not known.
        records: The last iterations; their time without waits stands in for an unknown time alone.
        solo_iteration_s: Seconds of an iteration when alone, None when not known.
    """
    if rate_per_s is None:
        return None
    if solo_iteration_s is None:
        if not records:
            return None
        solo_iteration_s = sum(record.busy_s for record in records) / len(records)
    return rate_per_s * solo_iteration_s


def shares_of(records: Sequence[IterationRecord]) -> dict[str, float]:
    """Shares of the last iterations' time: one for each stage, "wait" for tokens, and "other"."""
    total_s = sum(record.iteration_s for record in records)
    if total_s <= 0:
        return {}
    held = {stage: sum(record.stage_s[i] for record in records) / total_s for i, stage in enumerate(STAGES)}
    wait = sum(sum(record.wait_s) for record in records) / total_s
    rest = max(0.0, 1.0 - wait - sum(held.values()))
    return {name: round(share, 4) for name, share in (held | {"wait": wait, "other": rest}).items()}


def group_status(
    arbiter: Arbiter | None, discipline: str, members: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """The status file's content but for what identifies the runtime.

    Args:
        arbiter: The arbiter; None before one exists.
        discipline: Shown as the discipline until then.
        members: Each member's part.
    """
    holders = [None] * len(RESOURCES) if arbiter is None else arbiter.holders()
    speeds = [speed for member in members.values() if isinstance(speed := member["speed"], float)]
    return {
        "updated": utc_now(),
        "discipline": discipline if arbiter is None else arbiter.discipline,
        "disciplines": arbiter.history if isinstance(arbiter, SwitchingArbiter) else [],
        "total_speed": sum(speeds) if speeds else None,
        "resources": _resources(members, holders),
        "members": members,
    }


def _resources(members: Mapping[str, Mapping[str, object]], holders: Sequence[str | None]) -> dict[str, object]:
    shares = [share for member in members.values() if isinstance(share := member["share"], dict)]
    busy = [min(1.0, sum(share.get(stage, 0.0) for share in shares)) for stage in STAGES]
    return {
        resource: {"holder": holder, "busy": round(share, 4)}
        for resource, holder, share in zip(RESOURCES, holders, busy, strict=True)
    }


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
