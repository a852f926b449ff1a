"""The runtime's socket: accepts attach requests and talks to each member's process."""

import contextlib
import functools
import logging
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

from muri.files import RendezvousError, make_run_dir
from muri.group_spec import cancelled_pilot
from muri.launcher import protocol
from muri.launcher.arbitration.arbiter import Arbiter
from muri.launcher.job.environment import run_of
from muri.launcher.protocol import AttachRequest, Frame, ProtocolError
from muri.launcher.runtime.admission import AdmissionControl, MemoryAdmission
from muri.launcher.runtime.member_table import MemberTable
from muri.launcher.runtime.ranks import Ranks
from muri.launcher.script.trace import Trace
from muri.launcher.sessions.peer_process import PeerProcess
from muri.launcher.sessions.process_session import ProcessSession, share_waiting_hint
from muri.launcher.sessions.setup import MemberSession, wait_without_spinning
from muri.launcher.threads import ThreadSession
from muri.profiler.records import STAGES

logger = logging.getLogger("muri.launcher")

HELLO_TIMEOUT_S: Final = 10.0
BACKLOG: Final = 64

SAVE_GRACE_S: Final = 60.0
"""How long a script with a checkpoint may work on until it is saved, after its member's process is gone."""


def _send_last(connection: socket.socket, frame: Frame) -> None:
    """Send a member's process its last frame; ignore that it may be gone."""
    with contextlib.suppress(OSError):
        protocol.send(connection, frame)
    with contextlib.suppress(OSError):  # else a process that is there, but could be told nothing, would wait for ever
        connection.shutdown(socket.SHUT_WR)


class Server:
    """Listens in the run directory, under the name by which members know their pilot job.

    `ended_by_signal` is set when a signal has told the runtime to end: Slurm ends its job.
    """

    def __init__(
        self,
        run_dir: Path,
        table: MemberTable,
        arbiter: Arbiter,
        admission: AdmissionControl,
        ranks: Ranks | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._arbiter = arbiter
        self._trace = trace
        self._memory = MemoryAdmission(table)
        self._page_fd = share_waiting_hint(arbiter)
        self._admission = admission
        self._run_dir = run_dir
        self._ranks = ranks
        rank = None if ranks is None else ranks.place.rank
        self._path = protocol.pilot_socket(run_dir, admission.pilot_job or protocol.NO_JOB, rank)
        self._table = table
        self._closing = False
        self.ended_by_signal = False
        self._latest: dict[str, tuple[int, MemberSession]] = {}
        self._unreported: set[MemberSession] = set()
        self._reported = threading.Condition()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def start(self) -> None:
        """Publish the name, and accept members; a RendezvousError if another runtime serves the pilot job."""
        protocol.require_short(self._path)
        make_run_dir(self._run_dir)
        protocol.remove_stale_sockets(self._run_dir)
        draft = self._path.with_suffix(".new")  # a socket that is bound and does not listen yet looks stale
        try:
            self._socket.bind(os.fspath(draft))
            self._socket.listen(BACKLOG)
            os.link(draft, self._path)
        except FileExistsError as error:
            raise RendezvousError(f"another runtime already serves {self._path.name} in {self._run_dir}") from error
        finally:
            draft.unlink(missing_ok=True)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def close(self) -> None:
        """Remove the name and accept no more members."""
        self._closing = True
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def await_reports(self, timeout_s: float) -> None:
        """Wait until each thread's end was told to its process: one that has finished must not run again."""
        with self._reported:
            self._reported.wait_for(lambda: not self._unreported, timeout_s)

    def _accept(self) -> None:
        while not self._closing:
            try:
                raw, _ = self._socket.accept()
                try:
                    threading.Thread(target=self._serve, args=(raw,), name="connection", daemon=True).start()
                except RuntimeError:  # no thread is left: the member goes back to the queue
                    raw.close()
                    raise
            except (OSError, RuntimeError):
                if self._closing:
                    return
                logger.exception("accepting a member failed")
                threading.Event().wait(1.0)

    def _serve(self, raw: socket.socket) -> None:
        with raw:
            try:
                raw.settimeout(HELLO_TIMEOUT_S)
                protocol.require_same_user(raw)
                hello = protocol.receive_with_files(raw, 3)
                raw.settimeout(None)
                if hello is not None and hello[0]["type"] == "leave":
                    self._leave(raw, *hello)
                elif hello is not None:
                    self._attach(raw, *hello)
            except (ProtocolError, OSError, RuntimeError) as error:  # no thread is left, too
                logger.warning("a connection was refused: %s", error)
                _send_last(raw, {"type": "refused", "kind": "protocol", "reason": str(error)})

    def _leave(self, connection: socket.socket, frame: Frame, files: list[int]) -> None:
        """Answer once no script of another run of the job is left here; that run's process is gone or soon will be."""
        _close_all(files)
        run, session = self._latest.get(str(frame.get("job_id")), (0, None))
        if session is not None and run != frame.get("run"):
            logger.info("another run of job %s waits for the end of its script here", session.member)
            session.ended.wait()
        _send_last(connection, {"type": "left"})

    def _attach(self, connection: socket.socket, frame: Frame, files: list[int]) -> None:
        try:
            request = AttachRequest.from_frame(frame)
            process = PeerProcess.of(connection)
            refusal = self._refusal(request)
            variables = self._variables(request)
            request = replace(request, environment={**request.environment, **variables})
            if self._ranks is not None and refusal is None:
                self._ranks.announce(request)
            session = None if refusal else self._session(request, (files[0], files[1], files[2]), process)
        except BaseException:
            _close_all(files)
            raise
        if session is None or not self._begin(session, request.target):
            _close_all(files)
            reason = f"job {request.job_id} already runs a script in its group"
            _send_last(connection, {"type": "refused"} | (refusal or {"kind": "busy", "reason": reason}))
            return
        self._latest[request.job_id] = run_of(request.environment), session
        logger.info("member %s runs %s", request.job_id, request.target)
        if isinstance(session, ProcessSession):
            _close_all(files)
            session.start(self._note_end)
            session.hand_over(connection, variables)
            return
        with self._reported:
            self._unreported.add(session)
        session.client_pid = process.pid
        session.start(functools.partial(self._report, connection))
        self._listen(connection, session)

    def _session(
        self, request: AttachRequest, files: tuple[int, int, int], process: PeerProcess
    ) -> ProcessSession | ThreadSession:
        """Return a session that has not started: a thread, which alone takes the files, or one of the member's own."""
        member, trace = request.job_id, self._trace

        def record(stage: int, start_s: float, end_s: float, wait_s: float) -> None:
            if trace is not None:
                trace.record(member, STAGES[stage], start_s, end_s, wait_s)

        spec, listener, threads = self._table.spec_of(member), None if trace is None else record, self._table.threads
        session: ProcessSession | ThreadSession
        if threads is not None and threads.takes(request) and _sees_the_same_files(process.pid):
            session = threads.session(request, files, self._arbiter, listener, spec)
        else:
            had_company = self._table.had_company
            session = ProcessSession(request, process, self._arbiter, self._page_fd, had_company, listener, spec)
        if trace is not None:
            session.clock.at_boundary.append(lambda: trace.iteration(member, session.clock.iterations))
        return session

    def _begin(self, session: MemberSession, script: str) -> bool:
        """Note the start of a session; return False if another script of the member still runs."""
        while not self._table.begin(session, script):
            _, before = self._latest.get(session.member, (0, None))
            if not isinstance(before, ProcessSession) or not before.is_over:
                return False
            before.ended.wait()
        return True

    def _variables(self, request: AttachRequest) -> dict[str, str]:
        """Return the variables that a member's script has besides those of its job."""
        variables = dict(request.environment)
        wait_without_spinning(variables)
        variables.update(self._admission.environment(request.job_id))
        return {name: value for name, value in variables.items() if request.environment.get(name) != value}

    def _refusal(self, request: AttachRequest) -> dict[str, str] | None:
        if self._closing:
            return {"kind": "ending", "reason": "the runtime is ending"}
        if reason := self._admission.refusal(request.job_id):
            return {"kind": "member", "reason": reason}
        if (refusal := self._memory.refusal(request.job_id)) is not None:
            return refusal
        return None if self._ranks is None else self._ranks.refusal(request)

    def _note_end(self, session: MemberSession) -> None:
        if self._table.threads is not None:
            self._table.threads.faults.session_ended(session)
        key = "" if self._ranks is None else self._ranks.arbiter.key_of(session.member)
        self._table.finish(session)  # from now on the member's next session may begin, under another key
        if self._ranks is not None:
            self._ranks.ended(session, key)
        logger.info("member %s ended with exit code %s", session.member, session.exit_code)

    def _report(self, connection: socket.socket, session: MemberSession) -> None:
        try:
            self._note_end(session)
            _send_last(connection, self._last_frame(session))
        finally:
            with self._reported:
                self._unreported.discard(session)
                self._reported.notify_all()

    def _last_frame(self, session: MemberSession) -> Frame:
        """Return the frame that ends a member's connection."""
        if session.lost:
            pilot = self._admission.pilot_job if self.ended_by_signal else None
            cause = session.lost_cause if pilot is None else cancelled_pilot(pilot, session.member)
            return {"type": "lost", "reason": cause or "the runtime was told to end"}
        if session.stopped_at is not None:
            return {"type": "preempted", "code": session.exit_code, "iteration": session.stopped_at}
        short = {"out_of_memory": True} if session.out_of_memory and self._table.had_company(session) else {}
        return {"type": "exit", "code": session.exit_code, **short}

    def _listen(self, raw: socket.socket, session: ThreadSession) -> None:
        try:
            while (frame := protocol.receive(raw)) is not None:
                if frame["type"] == "signal":
                    session.deliver(int(frame["signum"]))
        except (OSError, ProtocolError, KeyError, TypeError, ValueError) as error:
            logger.warning("connection of member %s: %s", session.member, error)
        session.client_pid = 0
        if not session.ended.is_set():
            logger.info("the process of member %s is gone: its script is cancelled", session.member)
            session.detach_output()
            if session.checkpointed:
                session.deliver(signal.SIGTERM)
                session.ended.wait(SAVE_GRACE_S)
            if not session.ended.is_set():
                session.end(signal.SIGTERM)
            session.ended.wait()


def _sees_the_same_files(pid: int) -> bool:
    """Return whether a process and this one are in the same mount namespace; False where that cannot be seen."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/mnt").readlink() == Path("/proc/self/ns/mnt").readlink()
    return False


def _close_all(files: list[int]) -> None:
    for file in files:
        os.close(file)
