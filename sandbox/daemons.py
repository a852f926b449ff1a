"""Start Slurm's daemons in a sandbox and wait until every node is idle."""

import time

from sandbox import instance as instances
from sandbox.errors import StartError
from sandbox.instance import Instance
from sandbox.progress import Progress
from sandbox.suites import Suite

_LOGS = ("/var/log/slurmctld.log", "/var/log/slurmd-n1.log")


#: A restarted controller finds jobs running, hence not only "idle".
_USABLE = frozenset({"idle", "mixed", "allocated", "completing"})


def _require(instance: Instance, *command: str) -> None:
    done = instances.run(instance, *command)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()
        raise StartError(f"`{' '.join(command)}` failed in the sandbox:\n{said}\n{_last_log_lines(instance)}")


def _last_log_lines(instance: Instance) -> str:
    return instances.run(instance, "tail", "-n", "8", *_LOGS).stdout.strip()


def start(instance: Instance, suite: Suite, progress: Progress) -> None:
    """Start every daemon; returns when the nodes are idle."""
    if suite.auth == "munge":
        _require(instance, "chown", "-R", "munge:munge", "/etc/munge", "/run/munge")
        _require(instance, "setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged")
    _require(instance, "slurmctld")
    for number in range(1, instance.nodes + 1):
        _require(instance, "slurmd", "-N", f"n{number}")
    wait_until_idle(instance, progress)


def wait_until_idle(instance: Instance, progress: Progress, deadline_s: float = 60.0) -> None:
    """Wait for the controller to answer and all nodes to have registered."""
    limit = time.monotonic() + deadline_s
    seen = ""
    while time.monotonic() < limit:
        done = instances.run(instance, "sinfo", "--noheader", "--Node", "--partition", "main", "--format", "%T")
        seen = done.stdout.strip() or done.stderr.strip()
        states = done.stdout.split()
        # A trailing * marks a node that does not answer (yet).
        if len(states) == instance.nodes and set(states) <= _USABLE:
            return
        progress.detail(f"waiting for the nodes: {seen.replace(chr(10), ' ')}")
        time.sleep(0.1)
    raise StartError(f"the nodes did not become idle in {deadline_s:.0f} s: {seen}\n{_last_log_lines(instance)}")


def stop_controller(instance: Instance, deadline_s: float = 30.0) -> None:
    """End slurmctld, which writes its state first."""
    instances.run(instance, "pkill", "-x", "slurmctld")
    limit = time.monotonic() + deadline_s
    while instances.run(instance, "pgrep", "-x", "slurmctld").returncode == 0:
        if time.monotonic() > limit:
            raise StartError(f"slurmctld does not end within {deadline_s:.0f} s of SIGTERM")
        time.sleep(0.1)


def start_controller(instance: Instance, progress: Progress) -> None:
    """Start slurmctld with the state it left."""
    _require(instance, "slurmctld")
    wait_until_idle(instance, progress)
