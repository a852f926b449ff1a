"""Slurm's daemons in a sandbox, started and waited for until every node is idle, and Muri's plugins for them."""

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox import instance as instances
from sandbox.instance import Instance
from sandbox.support import (
    CHECKOUT,
    CLI_FILTER_TARGET,
    CONTROLLER,
    JOB_SUBMIT_TARGET,
    SPANK_TARGET,
    Progress,
    StartError,
)

SPANK_SOURCE = CHECKOUT / "slurm_plugin/spank"
JOB_SUBMIT_SOURCE = CHECKOUT / "slurm_plugin/job_submit"
CLI_FILTER_SOURCE = CHECKOUT / "slurm_plugin/cli_filter"
_UNIFIED_SOURCE = CHECKOUT / "sandbox/unified_cgroup.c"
_UNIFIED_LIBRARY = Path("/usr/local/lib/unified_cgroup.so")

#: `sinfo`'s columns that `parse_nodes` reads: name, state, reason.
SINFO_FORMAT = "%N|%T|%E"

#: A restarted controller finds jobs running, so "idle" is not the only good state.
USABLE = frozenset({"idle", "mixed", "allocated", "completing", "reserved"})

#: A slurmd that ends this often while it starts will not do better the next time.
_MOST_STARTS = 3

#: How often a wait looks for slurmds that have ended.
_REVIVE_EVERY_S = 2.0
_MOST_LOGS = 5
CONTROLLER_LOG = "/var/log/slurmctld.log"
_NODE_LOG = "/var/log/slurmd-{}.log"


def install_spank(instance: Instance, progress: Progress) -> bool:
    """Compile the SPANK plugin against the sandbox's Slurm; without it jobs are ordinary jobs."""
    if not (SPANK_SOURCE / "Makefile").exists():
        progress.step("this checkout has no SPANK plugin: sbatch has no --muri here")
        return False
    scratch = "/tmp/muri-spank"  # the sandbox's own /tmp
    instances.run(instance, "cp", "-r", str(SPANK_SOURCE), scratch)
    instances.run(instance, "mkdir", "-p", str(SPANK_TARGET.parent))
    done = instances.run(
        instance, "make", "--directory", scratch, "--always-make",
        "SLURM_INCLUDE=/usr/include", f"OUT={SPANK_TARGET}",
    )  # fmt: skip
    instances.run(instance, "rm", "-rf", scratch)
    if done.returncode != 0 or instances.run(instance, "test", "-f", str(SPANK_TARGET)).returncode != 0:
        progress.step(f"the SPANK plugin did not compile, so sbatch has no --muri here:\n{done.stderr.strip()}")
        return False
    _copy_from_controller(instance, SPANK_TARGET, instance.hosts)
    return True


def install_job_submit(instance: Instance, progress: Progress) -> bool:
    """Copy the job_submit files; the sandbox's own job_submit.lua loads them."""
    if not (JOB_SUBMIT_SOURCE / "job_submit.lua").exists():
        progress.step("this checkout has no job_submit.lua: jobs are not tagged or held at submit here")
        return False
    _copy_lua(instance, CONTROLLER, JOB_SUBMIT_SOURCE, JOB_SUBMIT_TARGET)
    return True


def hide_old_hierarchies(instance: Instance) -> None:
    """Let all programs on the nodes see cgroups as on a machine that has version 2 alone; Slurm's plugin insists."""
    compiler = ("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(_UNIFIED_LIBRARY), str(_UNIFIED_SOURCE))
    require(instance, *compiler, logs=())
    _copy_from_controller(instance, _UNIFIED_LIBRARY, instance.node_names)
    for node in instance.node_names:
        (instance.root_of(node) / "etc/ld.so.preload").write_text(f"{_UNIFIED_LIBRARY}\n", encoding="utf-8")


def install_cli_filter(instance: Instance) -> None:
    """Copy the cli_filter files to every host that has srun; the sandbox's own cli_filter.lua loads them."""
    for host in instance.host_names:
        _copy_lua(instance, host, CLI_FILTER_SOURCE, CLI_FILTER_TARGET)


def _copy_from_controller(instance: Instance, file: Path, hosts: Iterable[str]) -> None:
    inside = file.relative_to("/")
    for host in hosts:
        target = instance.root_of(host) / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(instance.root_of(CONTROLLER) / inside, target)


def _copy_lua(instance: Instance, host: str, source: Path, target: Path) -> None:
    directory = instance.root_of(host) / target.relative_to("/")
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.lua"):
        shutil.copy(file, directory / file.name)


@dataclass(frozen=True)
class NodeState:
    """A node as the controller sees it. A state that ends in `*` marks a node that does not answer (yet)."""

    name: str
    state: str
    reason: str = "none"

    @property
    def usable(self) -> bool:
        """Whether jobs can start on it."""
        return self.state in USABLE

    def __str__(self) -> str:
        """Return a line about it for people."""
        return f"{self.name} is {self.state}" + ("" if self.reason == "none" else f" ({self.reason})")


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Read what `sinfo --noheader --Node --format=%N|%T|%E` prints, by the nodes' names."""
    lines = (line.split("|", 2) for line in text.splitlines() if line.count("|") >= 2)
    return {name: NodeState(name, state, reason.strip()) for name, state, reason in lines}


def waiting_for(names: Iterable[str], nodes: dict[str, NodeState]) -> list[NodeState]:
    """Return those of the named nodes that are not usable; one that the controller leaves out is unknown."""
    states = (nodes.get(name, NodeState(name, "unknown")) for name in names)
    return [node for node in states if not node.usable]


def start_munge(instance: Instance) -> None:
    """Start munged on every host."""
    as_munge = "setpriv --reuid munge --regid munge --clear-groups munged"
    for host in instance.host_names:
        script = f"chown -R munge:munge /etc/munge /run/munge && {as_munge}"
        require(instance, "sh", "-c", script, logs=(), on=host)


def start(instance: Instance, progress: Progress) -> None:
    """Start slurmctld and the slurmds; returns when the nodes are idle."""
    require(instance, "slurmctld")
    for node in instance.node_names:
        ensure_slurmd(instance, node, progress)
    wait_until_idle(instance, progress)


def ensure_slurmd(instance: Instance, node: str, progress: Progress) -> None:
    """Start a node's slurmd unless it runs; returns when it has everything it shares with other slurmds.

    With auth/slurm each slurmd removes /run/slurm/sack.socket and binds it anew. Two that do so at the same time
    disturb each other, and the loser ends after `slurmd` has already returned 0. So they start one after the other.

    Raises:
        StartError: It ends again and again; the text holds its log.
    """
    for attempt in range(_MOST_STARTS):
        if _slurmd_runs(instance, node):
            return
        if attempt:
            progress.step(f"the slurmd of {node} ended while it started; starting it again")
        if _start_slurmd(instance, node):
            return
    raise StartError(
        f"the slurmd of {node} ended {_MOST_STARTS} times while it started:\n"
        f"{last_log_lines(instance, _logs_of([node]))}"
    )


def wait_until_idle(instance: Instance, progress: Progress, deadline_s: float = 180.0) -> None:
    """Wait for the controller to answer and all nodes to have registered; a slurmd that has ended is started again.

    Raises:
        StartError: Some did not; the text names them with their states, reasons and logs.
    """
    began = revived = time.monotonic()
    while True:
        done = instances.run(instance, "sinfo", "--noheader", "--Node", "--format", SINFO_FORMAT)
        missing = waiting_for(instance.node_names, parse_nodes(done.stdout))
        if not missing:
            return
        seen = "; ".join([*map(str, missing), *filter(None, [done.stderr.strip()])])
        if time.monotonic() - began > deadline_s:
            raise _not_idle(instance, missing, seen, deadline_s)
        progress.detail(f"waiting for the nodes: {seen}")
        if time.monotonic() - revived > _REVIVE_EVERY_S:
            revived = time.monotonic()
            for node in missing:
                ensure_slurmd(instance, node.name, progress)
        time.sleep(0.1)


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
    require(instance, "slurmctld")
    wait_until_idle(instance, progress)


def require(instance: Instance, *command: str, logs: Iterable[str] = (CONTROLLER_LOG,), on: str = CONTROLLER) -> None:
    """Run a command as root inside.

    Raises:
        StartError: It failed; the text holds its output and the ends of the named logs.
    """
    done = instances.run(instance, *command, on=on)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()
        raise StartError(
            f"`{' '.join(command)}` failed in the sandbox on {on}:\n{said}\n{last_log_lines(instance, logs)}"
        )


def last_log_lines(instance: Instance, logs: Iterable[str]) -> str:
    """Return the ends of the first few logs, each with its name."""
    tails = [
        instances.run(instance, "tail", "--verbose", "-n", "8", log, on=_host_of_log(instance, log))
        for log in list(logs)[:_MOST_LOGS]
    ]
    return "\n".join((tail.stdout + tail.stderr).strip() for tail in tails)


def _logs_of(nodes: Iterable[str]) -> list[str]:
    return [CONTROLLER_LOG, *(_NODE_LOG.format(node) for node in nodes)]


def _host_of_log(instance: Instance, log: str) -> str:
    nodes = {_NODE_LOG.format(node): node for node in instance.node_names}
    return instance.host_of(nodes.get(log, CONTROLLER))


def _slurmd_runs(instance: Instance, node: str) -> bool:
    return instances.run(instance, "pgrep", "--exact", "--full", f"(.*/)?slurmd -N {node}").returncode == 0


def _start_slurmd(instance: Instance, node: str, deadline_s: float = 60.0) -> bool:
    """Start a slurmd and wait for its pid file, written once its sockets are bound; returns whether it lives."""
    host = instance.host_of(node)
    pid_file = instance.root_of(host) / f"run/slurmd-{node}.pid"
    pid_file.unlink(missing_ok=True)
    require(instance, "slurmd", "-N", node, logs=_logs_of([node]), on=host)
    limit = time.monotonic() + deadline_s
    while not pid_file.exists():
        if not _slurmd_runs(instance, node):
            return False
        if time.monotonic() > limit:
            raise StartError(
                f"the slurmd of {node} was not ready within {deadline_s:.0f} s:\n"
                f"{last_log_lines(instance, _logs_of([node]))}"
            )
        time.sleep(0.01)
    return True


def _not_idle(instance: Instance, missing: Sequence[NodeState], seen: str, deadline_s: float) -> StartError:
    logs = last_log_lines(instance, _logs_of(node.name for node in missing))
    return StartError(f"the nodes did not become idle in {deadline_s:.0f} s: {seen}\n{logs}")
