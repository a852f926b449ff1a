"""Which processes on this node are those of a pilot job's members."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from polling import until

from muri.slurm_plugin.node import member_processes
from muri.slurm_plugin.node.member_processes import MemberProcesses, standard_error

PILOT = 2_000_000_000 + os.getpid()  # tests may run at the same time
WAITS = "import subprocess, sys; subprocess.run(['cat'])"


@pytest.fixture
def started() -> "Iterator[list[subprocess.Popen[bytes]]]":
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with process:
            pass  # its standard input is closed, with which it ends


def start(started: "list[subprocess.Popen[bytes]]", job: str, pilot: int = PILOT) -> int:
    """Start a job's task and a child of it; returns the task's id."""
    environment = {**os.environ, "MURI_PILOT": str(pilot), "SLURM_JOB_ID": job}
    process = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, env=environment)
    started.append(process)
    return process.pid


def test_a_known_member_is_found_without_the_plugin(started: "list[subprocess.Popen[bytes]]") -> None:
    job = str(PILOT + 5)
    task = start(started, job, PILOT + 1)
    until(lambda: MemberProcesses(PILOT, [job]).search() == {job: {task}}, "the job")


def found(processes: MemberProcesses) -> dict[str, frozenset[int]]:
    processes._due._next_s = 0.0
    processes.look()
    return dict(processes.found)


def test_members_are_found_by_what_the_plugin_has_set_each_with_its_tasks(
    started: "list[subprocess.Popen[bytes]]",
) -> None:
    first, step, other = (start(started, job) for job in ("11", "11", "12"))
    start(started, "13", PILOT + 1)
    start(started, "../x")
    processes = MemberProcesses(PILOT)
    until(lambda: found(processes) == {"11": {first, step}, "12": {other}}, "both jobs with their tasks alone")


def test_the_parent_of_a_process_with_any_name_is_known() -> None:
    words = r"printf '(odd\377) S' >/proc/$$/comm; echo; read line"
    with subprocess.Popen(["sh", "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert member_processes._parent(process.pid) == os.getpid()


def test_a_job_without_a_process_is_gone_at_once(started: "list[subprocess.Popen[bytes]]") -> None:
    start(started, "11")
    processes = MemberProcesses(PILOT)
    until(lambda: bool(found(processes)), "the job")
    processes._due._next_s = float("inf")
    assert processes.look() == {"11"}
    with started.pop():
        pass
    assert processes.look() == set()


def test_a_processs_standard_error_can_be_written_to_after_its_end(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stderr=output)
    stderr = standard_error([2**22 + 1, process.pid])
    with process:
        pass
    assert stderr is not None
    os.write(stderr, b"why")
    os.close(stderr)
    assert (tmp_path / "out").read_bytes() == b"why"
    assert standard_error([process.pid]) is None
