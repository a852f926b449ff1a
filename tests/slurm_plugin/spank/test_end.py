"""The end of a job on a node: jobs that were granted its GPUs are requeued, and gone when the epilog returns."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endings import NODE, STUBBORN, USER, JobCgroup
from polling import until

PILOT, MEMBER = 5, 7
LONG_MS = 600_000
ENDED = f'echo "ended $1?" >> "$ASKED"; test $1 = {PILOT}'


class Node:
    """A node's directory, and epilogs on it."""

    def __init__(self, program: Path, place: Path) -> None:
        self.place = place
        self._program = program
        place.mkdir()
        self.asked = place.parent / "asked"
        self.asked.touch()
        self.hook = f'echo "$1 $2" >> {self.asked}'
        self("holds", PILOT, USER)

    def __call__(self, verb: str, *words: object) -> None:
        subprocess.run([self._program, verb, self.place, *map(str, words)], check=True)

    def grant(self, cgroup: object, *, job: int = MEMBER, pilot: int = PILOT, run: int = 0) -> None:
        self("grant", job, pilot, USER, run, cgroup)

    def start(self, job: int = PILOT, *, ask_ms: int = LONG_MS, grace_ms: int = LONG_MS, before: str = "exec",
              hook: str = "") -> subprocess.Popen[str]:  # fmt: skip
        words = [self._program, "end", self.place, NODE, job, ask_ms, grace_ms, 0]
        line = ["sh", "-c", f'{before} "$@"', "sh", *map(str, words)]
        environment = {**os.environ, "HOOK": hook or self.hook}
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def end(self, job: int = PILOT, **options: Any) -> str:
        """Run an epilog to its end and return its text."""
        process = self.start(job, **options)
        said, _ = process.communicate()
        assert process.returncode == 0
        return said

    def prolog(self, job: int, gpus: str = "0") -> None:
        """Run a job's prolog to its end."""
        environment = {**os.environ, "HOOK": self.hook, "ENDED": ENDED, "ASKED": str(self.asked)}
        subprocess.run([self._program, "prolog", self.place, NODE, str(job), gpus], env=environment, check=True)

    def grants(self) -> set[str]:
        return {path.name for path in self.place.glob("grant-*")}


@pytest.fixture
def node(try_end: Path, tmp_path: Path) -> Node:
    return Node(try_end, tmp_path / NODE)


def when(path: Path, act: Callable[[], None]) -> threading.Thread:
    """Act once slurmctld has been asked."""

    def wait() -> None:
        until(path.read_text, "a call")
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_job_that_shared_nothing_leaves_nothing_and_asks_nothing(node: Node) -> None:
    node.grant("", job=8, pilot=6)
    assert node.end() == ""
    assert not (node.place / f"job-{PILOT}").exists()
    assert node.grants() == {"grant-8"}
    assert node.end(99) == ""
    assert node.asked.read_text() == ""


def test_a_member_that_ends_by_itself_has_its_time(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", "trap 'exit 3' TERM; echo; while :; do sleep 0.05; done")
    node.grant(job.path)
    slurm = when(node.asked, lambda: os.kill(process.pid, signal.SIGTERM))
    node.end()
    slurm.join()
    assert process.wait() == 3
    assert node.asked.read_text() == f"{MEMBER} hold\n"


@pytest.mark.parametrize("what", [STUBBORN, "echo; kill -STOP $$"], ids=["ignores SIGTERM", "stops itself"])
def test_a_member_that_does_not_end_is_killed_once_it_is_requeued(node: Node, job: JobCgroup, what: str) -> None:
    stepd = job.stepd()
    process = job.start("sh", "-c", what)
    node.grant(job.path)
    node.end(grace_ms=50)
    assert process.wait(60) == -signal.SIGKILL
    assert job.pids() == {stepd.pid}
    assert node.asked.read_text() == f"{MEMBER} hold\n"


def test_it_is_not_killed_before_slurmctld_knows_and_then_killed_all_the_same(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    back = node.place.parent / "back"
    epilog = node.start(grace_ms=1, hook=f"{node.hook}; test -e {back}")
    until(lambda: node.asked.read_text().count(f"{MEMBER} hold\n") > 1, "another try")
    assert (process.poll(), epilog.poll()) == (None, None)
    back.touch()
    assert process.wait(60) == -signal.SIGKILL
    epilog.communicate()
    assert epilog.returncode == 0


def test_without_an_asker_no_time_is_lost(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    node.end(hook="kill -KILL $PPID")
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("hook", ["false", "exec sleep 5 >&- 2>&-"], ids=["refuses", "hangs"])
def test_without_slurmctld_it_is_killed_in_the_end(node: Node, job: JobCgroup, hook: str) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    node.end(ask_ms=100, grace_ms=50, hook=hook)
    assert process.wait(60) == -signal.SIGKILL


def test_a_later_run_of_the_job_is_left_alone(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    (node.place / "later").write_text((node.place / f"grant-{MEMBER}").read_text().replace("run=0", "run=1"))
    node.end(grace_ms=1, hook=f"mv {node.place}/later {node.place}/grant-{MEMBER}")
    assert process.poll() is None


def test_one_whose_own_epilog_is_through_is_left_alone(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    node.end(grace_ms=LONG_MS, hook=f"rm {node.place}/grant-{MEMBER}")
    assert process.poll() is None


def test_what_a_member_leaves_behind_ends_with_it(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    node.grant("", job=8)
    assert node.end(MEMBER) == ""
    assert process.wait(60) == -signal.SIGKILL
    assert node.grants() == {"grant-8"}
    assert node.asked.read_text() == ""


def test_a_new_session_opens_no_gpu_once_the_pilot_has_ended(node: Node, job: JobCgroup, tmp_path: Path) -> None:
    if len(job.roots) == 1:
        pytest.skip("the programs of version 2 are Slurm's and root's: they are tried on a sandbox")
    for root in job.roots:
        (root / "step_extern").mkdir()
    os.setxattr(job.path / "step_extern", "trusted.muri.devices", b"c 1:5 rwm,c 1:7 rwm")  # /dev/zero, /dev/full

    def opens(device: str) -> bool:
        tried = tmp_path / "tried"
        job.start("sh", "-c", f"true <{device}; echo $? >{tried}; echo", into="step_extern", user=None).wait()
        return tried.read_text() == "0\n"

    node.grant(job.path)
    assert [opens("/dev/zero"), opens("/dev/full")] == [True, True]
    node.end()
    assert [opens("/dev/null"), opens("/dev/zero"), opens("/dev/full")] == [True, False, False]


def test_a_cgroup_that_is_noted_after_the_pilots_end_began(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    noted = (node.place / f"grant-{MEMBER}").read_text()
    node.grant(f"{job.path}0")
    (node.place / "noted").write_text(noted)
    node.end(grace_ms=1, hook=f"mv {node.place}/noted {node.place}/grant-{MEMBER}")
    assert process.wait(60) == -signal.SIGKILL


def test_epilogs_of_a_pilot_and_its_member_at_once(node: Node, job: JobCgroup) -> None:
    for _ in range(5):
        node("holds", PILOT, USER)
        job.start("sh", "-c", STUBBORN)
        node.grant(job.path)
        epilogs = [node.start(each, grace_ms=10) for each in (PILOT, MEMBER)]
        for epilog in epilogs:
            epilog.communicate()
        assert [epilog.returncode for epilog in epilogs] == [0, 0]
        assert job.pids() == set()
        assert node.grants() == set()


def test_an_epilog_that_is_ended_by_slurmd_does_its_work(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    epilog = node.start()
    until(node.asked.read_text, "a call")
    os.killpg(epilog.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    epilog.communicate()


def test_an_epilog_whose_slurmd_has_gone_loses_no_time(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    slurmd = node.start(before="set -m; ")
    until(node.asked.read_text, "a call")
    os.kill(slurmd.pid, signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    slurmd.communicate()


def test_a_killed_keeper_is_replaced_by_its_epilog(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    epilog = node.start(hook=f"{node.hook}; kill -KILL $(ps -o ppid= -p $PPID)")
    epilog.communicate()
    assert epilog.returncode == 0
    assert process.wait(60) == -signal.SIGKILL


def test_an_epilog_that_cannot_read_the_grants_keeps_the_gpus_closed(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant(job.path)
    epilog = node.start(before="ulimit -n 5; exec")  # a directory fits, a file of it does not
    assert epilog.stdout
    assert "stay closed" in epilog.stdout.readline()
    assert (process.poll(), epilog.poll()) == (None, None)
    epilog.kill()
    epilog.communicate()


def test_the_next_jobs_prolog_ends_what_an_epilog_left(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.grant("", job=8, pilot=6)
    node("holds", 6, USER)
    node.grant(job.path)
    node.prolog(9)
    assert process.wait(60) == -signal.SIGKILL
    assert sorted(node.asked.read_text().splitlines()) == [f"{MEMBER} hold", "ended 5?", "ended 6?"]
    assert {path.name for path in node.place.glob("job-*")} == {"job-6"}
    assert node.grants() == {"grant-8"}  # the next prolog asks no more about the one that ended


def test_a_prolog_asks_nothing_where_no_other_job_has_shared(node: Node, job: JobCgroup) -> None:
    process = job.start("sh", "-c", STUBBORN)
    node.prolog(9)
    node.grant(job.path)
    node.prolog(PILOT)
    assert node.asked.read_text() == ""
    assert process.poll() is None


@pytest.mark.parametrize("gpus", ["1", "2,10"])
def test_a_prolog_asks_nothing_of_pilots_with_other_gpus(node: Node, gpus: str) -> None:
    node.grant("")
    node.prolog(9, gpus)
    assert node.asked.read_text() == ""
    node.prolog(9, f"{gpus},0")
    assert node.asked.read_text() == f"ended {PILOT}?\n{MEMBER} hold\n"


def test_a_prolog_asks_of_a_pilot_whose_epilog_has_begun(node: Node) -> None:
    node.grant("")
    (node.place / f"job-{PILOT}").unlink()
    node.prolog(9, "1")
    assert node.asked.read_text() == f"ended {PILOT}?\n{MEMBER} hold\n"


def test_thousands_of_grants(node: Node, tmp_path: Path) -> None:
    for number in range(3000):
        pilot = PILOT if number % 10 == 0 else 6
        grant = f"pilot={pilot}\nuid={USER}\nrun=0\ngate=license\ncgroup={tmp_path}/absent\n"
        (node.place / f"grant-{1000 + number}").write_text(grant)
    node.end(grace_ms=1, hook=f"printf '%s\\n' $1 >> {node.asked}")
    assert sorted(node.asked.read_text().split()) == [str(number) for number in range(1000, 4000, 10)]
