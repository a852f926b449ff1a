"""Measures how long it takes to pass a resource from one member's process to another's."""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from muri.errors import MuriError
from muri.launcher.arbitration.arbiter import Arbiter, PausingArbiter
from muri.launcher.arbitration.disciplines import FairArbiter
from muri.launcher.arbitration.switching import SwitchingArbiter
from muri.launcher.protocol import AttachRequest
from muri.launcher.sessions.peer_process import PeerProcess
from muri.launcher.sessions.process_session import ProcessSession, share_waiting_hint

HOLD_S: Final = 0.0005
TIMEOUT_S: Final = 60.0

_SCRIPT: Final = """
import json, os, socket, sys, time
from muri.launcher import process_gate, protocol
_, files = protocol.receive_with_files(socket.socket(fileno=int(sys.argv[4])), 2)
gate = process_gate.gate_from_environment(process_gate.gate_variables(*files, traced=False))
count, hold_s, result = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
asked, taken, given = [], [], []
open(result, "w").close()
while len([name for name in os.listdir() if name.endswith(".json")]) < 2:
    time.sleep(0.001)
for _ in range(count):
    asked.append(time.perf_counter())
    gate.acquire(0)
    taken.append(time.perf_counter())
    end = taken[-1] + hold_s
    while time.perf_counter() < end:
        pass
    given.append(time.perf_counter())
    gate.release(0)
with open(result, "w") as file:
    json.dump([asked, taken, given], file)
gate.exit(0)
"""


_Member = tuple[ProcessSession, "subprocess.Popen[bytes]"]


class SwitchError(MuriError):
    """The members of the measurement did not run to their end."""


def runtime_arbiter() -> Arbiter:
    """An arbiter with all that a runtime puts around it; it stays with `fair`."""
    return PausingArbiter(SwitchingArbiter({"fair": FairArbiter}))


def measure_switches_s(count: int = 1000) -> list[float]:
    """Return seconds from one process's release to the other one's grant, for each time that the other one waited.

    Two processes that always want the same resource run through a real `ProcessSession` and a runtime's arbiter.
    """
    with tempfile.TemporaryDirectory(prefix="muri-switch-") as folder:
        script = Path(folder) / "switch.py"
        script.write_text(_SCRIPT, encoding="utf-8")
        arbiter = runtime_arbiter()
        page_fd = share_waiting_hint(arbiter)
        try:
            _run([_session(member, script, count, arbiter, page_fd) for member in ("1", "2")])
        finally:
            os.close(page_fd)
        return _switches_s([json.loads((Path(folder) / f"{member}.json").read_text()) for member in ("1", "2")])


def _session(member: str, script: Path, count: int, arbiter: Arbiter, page_fd: int) -> _Member:
    """Start a process that connects as `muri run` does, and watch it as a runtime does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = (str(script), str(count), str(HOLD_S), str(script.with_name(f"{member}.json")), str(theirs.fileno()))
        command = [sys.executable, *words]
        process = subprocess.Popen(
            command, cwd=script.parent, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        request = AttachRequest(
            job_id=member,
            target=words[0],
            module=False,
            arguments=words[1:],
            cwd=str(script.parent),
            environment=dict(os.environ),
            umask=0o077,
            executable=sys.executable,
            prefix=sys.prefix,
            python=sys.version,
        )
        session = ProcessSession(request, PeerProcess(process.pid), arbiter, page_fd, lambda _session: True)
        session.start(lambda _session: None)
        session.hand_over(ours, {})
    return session, process


def _run(members: list[_Member]) -> None:
    for session, process in members:
        if not session.ended.wait(TIMEOUT_S):
            process.kill()
        process.wait()
        if session.exit_code != 0:
            raise SwitchError(f"member {session.member} of the measurement ended with {session.exit_code}")


def _switches_s(times: list[list[list[float]]]) -> list[float]:
    """From each release to the next grant, where that is the other process's and was asked for before."""
    events = sorted(
        (taken_s, asked_s, given_s) for each in times for asked_s, taken_s, given_s in zip(*each, strict=True)
    )
    return [after[0] - before[2] for before, after in itertools.pairwise(events) if after[1] < before[2]]
