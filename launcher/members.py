"""What the runtime knows of its members, and the status file that tells the controller."""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.gpu import faults as gpu_faults
from muri.launcher.member_session import MemberSession
from muri.launcher.telemetry import rates as telemetry
from muri.launcher.telemetry.rates import Expectation, SpeedMeter
from muri.launcher.whole_files import write_whole
from muri.profiler.records import STAGES


@dataclass(slots=True)
class Member:
    """One member of the group.

    Attributes:
        session: The session that runs, or ran last.
        state: "waiting" (has not come yet), "running" or "ended" (its last script ended; it may
            come again with another).
        sessions: Sessions so far, the running one included.
        earlier_iterations: Iterations of the sessions that ended.
        script: What the session runs.
        started: When it started, UTC.
        expectation: What is known of the member beforehand.
        meter: Its session's speed.
    """

    session: MemberSession | None = None
    state: str = "waiting"
    sessions: int = 0
    earlier_iterations: int = 0
    script: str = ""
    started: str | None = None
    expectation: Expectation = field(default_factory=Expectation)
    meter: SpeedMeter = field(default_factory=SpeedMeter)

    def status(self) -> dict[str, object]:
        """The member's part of the status file."""
        session, expected = self.session, self.expectation
        records = [] if session is None else list(session.clock.recent)
        count = len(records)
        running = session.clock.iterations if session is not None and self.state == "running" else 0
        mean = [sum(record.stage_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        wait = [sum(record.wait_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        at_work = self.state == "running"
        if at_work:
            self.meter.look(time.monotonic(), running)
        rate_per_s = self.meter.per_s(records) if at_work else None
        return {
            "state": self.state,
            "script": self.script,
            "started": self.started,
            "sessions": self.sessions,
            "iterations": self.earlier_iterations + running,
            "iteration_s": None if session is None else session.clock.recent_iteration_s(),
            "iterations_per_s": rate_per_s,
            "solo_iteration_s": expected.solo_iteration_s,
            "speed": telemetry.speed_of(rate_per_s, records, expected.solo_iteration_s),
            "predicted_speed": expected.predicted_speed,
            "share": telemetry.shares_of(records) if at_work else {},
            "stage_s": dict(zip(STAGES, mean, strict=True)),
            "wait_s": dict(zip(STAGES, wait, strict=True)),
            "gpu_mem_peak_gib": None if session is None else session.clock.gpu.gpu_mem_peak_gib,
            "isolation": None if session is None else session.isolation,
            "checkpoint": session is not None and session.checkpointed,
            "exit_code": None if session is None or self.state == "running" else session.exit_code,
        }


class MemberTable:
    """The members by job id; safe to use from several threads.

    Attributes:
        changed: Set whenever a session starts or ends; who waits for it clears it.
    """

    def __init__(self, members: list[str], discipline: str) -> None:
        self._members = {member: Member() for member in members}
        self._discipline = discipline
        self._started = telemetry.utc_now()
        self._arbiter: Arbiter | None = None
        self._lock = threading.Lock()
        self.changed = threading.Event()

    def __contains__(self, member: str) -> bool:
        """Whether the job is a member."""
        return member in self._members

    def watch(
        self, arbiter: Arbiter, solo_iteration_s: Mapping[str, float], predicted_speed: Mapping[str, float]
    ) -> None:
        """Say what the members' speed is measured against, and who passes the resources on."""
        self._arbiter = arbiter
        for name, member in self._members.items():
            member.expectation = Expectation(solo_iteration_s.get(name), predicted_speed.get(name))

    def add(self, member: str) -> None:
        """A job that joins the group; it is no error when it is a member already."""
        with self._lock:
            self._members.setdefault(member, Member())
            self.changed.set()

    def begin(self, session: MemberSession, script: str = "") -> bool:
        """Note that a session of a script starts; False when the member has one that runs."""
        with self._lock:
            member = self._members[session.member]
            if member.state == "running":
                return False
            member.session, member.state = session, "running"
            member.sessions += 1
            member.script, member.started, member.meter = script, telemetry.utc_now(), SpeedMeter()
            self.changed.set()
            return True

    def finish(self, session: MemberSession) -> None:
        """Note that it ended."""
        with self._lock:
            member = self._members[session.member]
            if member.session is session and member.state == "running":
                member.state = "ended"
                member.earlier_iterations += session.clock.iterations
                self.changed.set()

    def running(self) -> list[MemberSession]:
        """The sessions under way."""
        with self._lock:
            return [m.session for m in self._members.values() if m.session is not None and m.state == "running"]

    def status(self) -> dict[str, object]:
        """Content of the status file."""
        with self._lock:
            members = {name: member.status() for name, member in self._members.items()}
        fault = gpu_faults.watch.fault
        group: dict[str, object] = {} if fault is None else {"fault": fault.status()}
        group |= {"pid": os.getpid(), "host_job": os.environ.get("SLURM_JOB_ID"), "started": self._started}
        return group | telemetry.group_status(self._arbiter, self._discipline, members)

    def write_status(self, path: Path) -> None:
        """Write the status file so that a reader sees all of it or none."""
        write_whole(path, self.status())
