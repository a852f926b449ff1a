"""Pilot jobs with members that hold their GPUs open, the ways in which pilot jobs end, and the jobs that come next."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from devices import grant

from sandbox import daemons
from sandbox.driver import Driver
from sandbox.init import FIRST_TERMINAL, TERMINAL_MAJOR
from sandbox.support import Progress

_OPENED: Final = """\
import glob, os
def opened():
    found = []
    for device in sorted(glob.glob("/dev/muri-gpu*")):
        try:
            found.append(os.open(device, os.O_RDWR | os.O_NOCTTY))
        except PermissionError:
            pass
    return found
"""

#: A member's program: opens all GPUs that it can, says so, and then does its best to stay.
HOLD_PY: Final = f"""\
import os, signal, sys, time
{_OPENED}
how = sys.argv[1]
while not (held := opened()):
    time.sleep(0.05)
if how != "obeys":
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)
if how == "daemon":
    for _ in range(2):
        if os.fork():
            os._exit(0) if os.getpid() == os.getsid(0) else signal.pause()
        os.setsid()
    os.environ.clear()
print("holds", len(held), flush=True)
if how == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
if how == "forks" and os.fork() == 0:
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.002)
while True:
    time.sleep(1)
"""

#: The next job: tells who still has one of its devices open. It is of the same user, who may look.
NEXT_PY: Final = f"""\
{_OPENED}
import re
def place(pid):
    return re.findall("slurm_n[0-9]+|n[0-9]+_slurmstepd", open(f"/proc/{{pid}}/cgroup").read())[:1]
mine, found = {{os.fstat(each).st_rdev for each in opened()}}, []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if int(pid) != os.getpid() and place(pid) == place("self"):  # all nodes see each other's processes
            found += [pid for each in os.scandir(f"/proc/{{pid}}/fd") if each.stat().st_rdev in mine]
    except OSError:
        pass
print(len(mine), "open to me, held by", *sorted(set(found)) or ["none"])
"""

KINDS: Final = ("obeys", "ignores", "daemon", "stops", "forks", "steps")
"""How members behave; one of "steps" starts a step after the other."""

#: Prints `NODE JOB` for each process with a stand-in GPU open, as the cgroup says in which Slurm put it. A process that
#: ends, or begins, meanwhile is in none at one of two looks.
_HOLDERS: Final = f"""\
import os, re
def job(pid):
    groups = open(f"/proc/{{pid}}/cgroup").read()
    found = re.search(r"slurm_(n\\d+)/uid_\\d+/([^/]+)|/(n\\d+)_slurmstepd.scope/([^/]+)", groups)
    return found and [*filter(None, found.groups())]
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        before = job(pid)
        numbers = [each.stat().st_rdev for each in os.scandir(f"/proc/{{pid}}/fd")]
        place = before or job(pid) or ("?", pid)
    except OSError:
        continue
    if any(os.major(each) == {TERMINAL_MAJOR} and os.minor(each) >= {FIRST_TERMINAL} for each in numbers):
        print(*place)
"""


@dataclass(frozen=True)
class Group:
    """A pilot job that holds all GPUs of a node, its members, and a job that waits for these GPUs."""

    node: str
    pilot: int
    members: tuple[int, ...]
    next: int


def _script(kind: str) -> str:
    if kind == "steps":
        return "while :; do timeout -s KILL 1 srun --overlap python3 hold.py ignores; done"
    return f"exec python3 hold.py {kind}"


class PilotEnds:
    """A site with constrained devices, on whose nodes pilot jobs end."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.nodes = driver.instance.node_names[:-1]  # the last one is reserved
        self.gpus = driver.instance.gpus_per_node
        driver.write("hold.py", HOLD_PY)
        driver.write("next.py", NEXT_PY)

    def root(self, script: str, on: str = "ctl", *, check: bool = True) -> str:
        """Run shell text as root on a host and return its output."""
        return self.driver.run("sh", "-c", script, user="root", on=on, check=check).stdout

    def pilot(self, node: str, *options: str) -> int:
        """Start a job with all GPUs of a node."""
        job = self.submit(node, "pilot", f"--gres=gpu:{self.gpus}", *options, script="exec sleep 3600")
        self.driver.wait_state(job, "RUNNING")
        return job

    def submit(self, node: str, name: str, *options: str, script: str) -> int:
        """Submit a job of alice's to a node; its output is in her `NAME-JOB.out`."""
        fixed = (f"--nodelist={node}", "--cpus-per-task=1", "--mem=64", "--requeue", "--open-mode=append")
        return self.driver.submit(*fixed, f"--output={name}-%j.out", *options, f"--wrap={script}")

    def start(self, node: str, *kinds: str, settled: bool = True, options: tuple[str, ...] = ()) -> Group:
        """Start a group whose members all hold the GPUs, or are about to, with a job that waits for these GPUs."""
        pilot = self.pilot(node, *options)
        members = tuple(self.member(node, pilot, _script(kind)) for kind in kinds)
        for member in members:
            self.driver.wait_state(member, "RUNNING")
            if settled:
                self.driver.wait_until(partial(self.holds, member), f"{member} to hold the GPUs")
        waits = self.submit(node, "next", f"--gres=gpu:{self.gpus}", script="exec python3 next.py")
        return Group(node, pilot, members, waits)

    def member(self, node: str, pilot: int, script: str, *options: str) -> int:
        """Submit a job without GPUs; root says, as the controller does, whose it shares."""
        job = self.submit(node, "member", "--hold", "--export=ALL,MURI_JOB=on", *options, script=script)
        grant(self.driver, job, f"muri-grant:{pilot}", f"dependency=after:{pilot}")
        return job

    def holds(self, member: int) -> bool:
        """Return whether a member has said that it has GPUs open."""
        return "holds" in self.output("member", member)

    def output(self, name: str, job: int) -> str:
        """Return a job's output."""
        path = f"/home/alice/{name}-{job}.out"
        return self.driver.run("cat", path, user="root", check=False).stdout  # there is none before its first step

    def holders(self) -> list[str]:
        """Return `NODE JOB` for each process with a GPU open, `? PID` for one of no job."""
        return self.driver.run("python3", "-c", _HOLDERS, user="root").stdout.splitlines()

    def restart_slurmd(self, node: str, signal: str) -> None:
        """End a node's slurmd and start it again."""
        self.root(f"pkill -{signal} -f '^([^ ]*/)?slurmd -N {node}$'", check=False)
        gone = f"! pgrep -f '^([^ ]*/)?slurmd -N {node}$'"
        self.driver.wait_until(lambda: bool(self.root(f"{gone} > /dev/null && echo gone", check=False)), "slurmd's end")
        daemons.ensure_slurmd(self.driver.instance, node, Progress())

    def next_had_them_alone(self, group: Group) -> None:
        """Wait for the next job; its GPUs must have been its own."""
        self.driver.wait_state(group.next, "COMPLETED")
        said = self.output("next", group.next)
        assert said == f"{self.gpus} open to me, held by none\n", (group, said, self.log(group.node))

    def ended(self, group: Group) -> None:
        """Wait for the next job; its GPUs must have been its own, and the members back in the queue."""
        self.next_had_them_alone(group)
        for member in group.members:
            # One that had not got its grant before the end waits a while for its pilot job, and runs nothing.
            self.driver.wait_until(partial(self.is_back, member), f"{member} of {group} in the queue")

    def is_back(self, member: int) -> bool:
        """Return whether a member is in the queue again, where Muri's hold keeps it."""
        fields = self.driver.job(member)
        assert fields["Restarts"] in ("0", "1"), fields
        return (fields["JobState"], fields["Restarts"], fields["Priority"]) == ("PENDING", "1", "0")

    def log(self, node: str) -> str:
        """Return the end of a slurmd's log."""
        return self.root(f"tail -n 40 /var/log/slurmd-{node}.log", on=node)


def _scancel(ends: PilotEnds, group: Group) -> None:
    ends.driver.run("scancel", str(group.pilot))


def _scancel_kill(ends: PilotEnds, group: Group) -> None:
    ends.driver.run("scancel", "--full", "--signal=KILL", str(group.pilot))


def _requeue(ends: PilotEnds, group: Group) -> None:
    ends.root(f"scontrol requeuehold {group.pilot}")


def _kill_stepd(ends: PilotEnds, group: Group) -> None:
    """Slurm does not notice before it asks, so the user does."""
    ends.root(f"pkill -KILL -f '^slurmstepd: \\[{group.pilot}[.]'", on=group.node)
    ends.driver.run("scancel", str(group.pilot))


def _kill_all_stepds(ends: PilotEnds, group: Group) -> None:
    """Nothing of Slurm's watches over the members any more."""
    jobs = "|".join(map(str, (group.pilot, *group.members)))
    ends.root(f"pkill -KILL -f '^slurmstepd: \\[({jobs})[.]'", on=group.node)
    ends.driver.run("scancel", str(group.pilot))


def _time_limit(ends: PilotEnds, group: Group) -> None:
    ends.root(f"scontrol update jobid={group.pilot} timelimit=1")


def _slurmd_restarts(signal: str) -> Callable[[PilotEnds, Group], None]:
    def act(ends: PilotEnds, group: Group) -> None:
        """Slurm ends the epilog with slurmd, or knows nothing of it afterwards; it does not run again."""
        ends.driver.run("scancel", str(group.pilot))
        running = "pgrep -f '^[^ ]*slurmstepd spank epilog' > /dev/null && echo epilog"
        ends.driver.wait_until(lambda: bool(ends.root(running, check=False)), "the epilog")
        ends.restart_slurmd(group.node, signal)

    return act


WAYS: Final[dict[str, Callable[[PilotEnds, Group], None]]] = {
    "scancel": _scancel,
    "scancel with SIGKILL": _scancel_kill,
    "requeue": _requeue,
    "its slurmstepd killed": _kill_stepd,
    "all slurmstepds killed": _kill_all_stepds,
    "its time limit": _time_limit,
    "slurmd restarted": _slurmd_restarts("TERM"),
    "slurmd killed": _slurmd_restarts("KILL"),
}
