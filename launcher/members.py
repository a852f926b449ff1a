"""What the runtime knows of its members, and the status file that tells the controller."""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from muri.launcher.member_session import MemberSession
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
    """

    session: MemberSession | None = None
    state: str = "waiting"
    sessions: int = 0
    earlier_iterations: int = 0

    def status(self) -> dict[str, object]:
        """The member's part of the status file."""
        session = self.session
        records = [] if session is None else list(session.clock.recent)
        count = len(records)
        running = session.clock.iterations if session is not None and self.state == "running" else 0
        mean = [sum(record.stage_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        wait = [sum(record.wait_s[i] for record in records) / count if count else 0.0 for i in range(len(STAGES))]
        return {
            "state": self.state,
            "sessions": self.sessions,
            "iterations": self.earlier_iterations + running,
            "iteration_s": None if session is None else session.clock.recent_iteration_s(),
            "stage_s": dict(zip(STAGES, mean, strict=True)),
            "wait_s": dict(zip(STAGES, wait, strict=True)),
            "isolation": None if session is None else session.isolation,
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
        self._lock = threading.Lock()
        self.changed = threading.Event()

    def __contains__(self, member: str) -> bool:
        """Whether the job is a member."""
        return member in self._members

    def begin(self, session: MemberSession) -> bool:
        """Note that a session starts; False when the member has one that runs."""
        with self._lock:
            member = self._members[session.member]
            if member.state == "running":
                return False
            member.session, member.state = session, "running"
            member.sessions += 1
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
        return {"pid": os.getpid(), "discipline": self._discipline, "members": members}

    def write_status(self, path: Path) -> None:
        """Write the status file so that a reader sees all of it or none."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(self.status()) + "\n", encoding="utf-8")
        temporary.replace(path)
