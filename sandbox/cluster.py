"""Render Slurm's configuration for a cluster of virtual nodes. Pure: shape in, text out."""

from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from sandbox.errors import UsageError
from sandbox.paths import CHECKOUT, node_names
from sandbox.suites import Suite

_TEMPLATES = CHECKOUT / "etc/sandbox"
_FIRST_NODE_PORT = 17001
#: What `cred_expire` is on a site whose slurm.conf does not set it.
SLURM_CRED_EXPIRE_S = 120


@dataclass(frozen=True)
class Partition:
    """A partition and the names of its nodes, in Slurm's notation."""

    name: str
    nodes: str


@dataclass(frozen=True)
class Shape:
    """How large the virtual cluster is.

    Attributes:
        cpus_per_node: Virtual CPUs. They are bookkeeping only; a group's host job and its members
            all need some on one node, so there are more than GPUs.
        mem_mib_per_node: Virtual memory of a node in MiB, bookkeeping as well.
        extra_partitions: Partitions beside `main`, which holds all nodes.
        cred_expire_s: How long a requeued job waits before Slurm starts it again. It is shorter than Slurm's own
            `SLURM_CRED_EXPIRE_S`, so that what requeues jobs is quick to try.
    """

    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 16
    mem_mib_per_node: int = 64_000
    extra_partitions: tuple[Partition, ...] = ()
    cred_expire_s: int = 10

    def __post_init__(self) -> None:
        """Refuse sizes that are out of range."""
        for option, value, least, most in (
            ("--nodes", self.nodes, 1, 64),
            ("--gpus-per-node", self.gpus_per_node, 1, 16),
            ("--cpus-per-node", self.cpus_per_node, 1, 1024),
        ):
            if not least <= value <= most:
                raise UsageError(f"{option} {value} is out of range: give {least} to {most}")

    @property
    def node_names(self) -> tuple[str, ...]:
        """Return n1, n2, and so on."""
        return node_names(self.nodes)

    @property
    def node_range(self) -> str:
        """Return all nodes in Slurm's notation."""
        return f"n[1-{self.nodes}]" if self.nodes > 1 else "n1"

    @property
    def device_files(self) -> tuple[str, ...]:
        """Return the stand-ins for /dev/nvidia0, …; Slurm wants a file per GPU. All nodes share the same."""
        return tuple(f"/dev/muri-gpu{number}" for number in range(self.gpus_per_node))


def parse_partition(text: str) -> Partition:
    """Read `NAME=NODES`, such as `small=n[1-2]`."""
    name, separator, nodes = text.partition("=")
    if not (separator and name.isidentifier() and nodes):
        raise UsageError(f"--partition {text!r} is malformed: write NAME=NODES, for example small=n[1-2]")
    return Partition(name, nodes)


def with_partitions(shape: Shape, texts: list[str]) -> Shape:
    """Add partitions given on the command line."""
    return replace(shape, extra_partitions=tuple(parse_partition(text) for text in texts))


def _template(name: str, **values: object) -> str:
    text = (_TEMPLATES / name).read_text(encoding="utf-8")
    return Template(text).substitute({key: str(value) for key, value in values.items()})


def _node_lines(shape: Shape) -> str:
    return "\n".join(
        f"NodeName={name} NodeAddr=127.0.0.1 Port={_FIRST_NODE_PORT + index} CPUs={shape.cpus_per_node} "
        f"RealMemory={shape.mem_mib_per_node} Gres=gpu:{shape.gpus_per_node} State=UNKNOWN"
        for index, name in enumerate(shape.node_names)
    )


def _partition_lines(shape: Shape) -> str:
    partitions = (Partition("main", "ALL"), *shape.extra_partitions)
    return "\n".join(
        f"PartitionName={partition.name} Nodes={partition.nodes} Default={'YES' if index == 0 else 'NO'} "
        "MaxTime=INFINITE DefaultTime=60 OverSubscribe=YES State=UP"
        for index, partition in enumerate(partitions)
    )


def slurm_files(shape: Shape, suite: Suite, instance: str) -> dict[str, str]:
    """Return every configuration file under /etc/slurm by its path."""
    slurm_conf = _template(
        "slurm.conf",
        cluster=f"muri-{instance}".lower(),
        auth=suite.auth,
        cred_expire_s=shape.cred_expire_s,
        mem_mib_per_cpu=max(1, shape.mem_mib_per_node // (2 * shape.cpus_per_node)),
        nodes=_node_lines(shape),
        partitions=_partition_lines(shape),
    )
    last = shape.gpus_per_node - 1
    device = f"/dev/muri-gpu[0-{last}]" if last else "/dev/muri-gpu0"
    files = {
        "slurm.conf": slurm_conf,
        "gres.conf": _template("gres.conf", nodes=shape.node_range, device=device),
        "job_submit.lua": (_TEMPLATES / "job_submit.lua").read_text(encoding="utf-8"),
        "plugstack.conf": (_TEMPLATES / "plugstack.conf").read_text(encoding="utf-8"),
        "cgroup.conf": suite.cgroup_conf,
    }
    return {str(Path("/etc/slurm", name)): text for name, text in files.items()}


def hosts_file(shape: Shape) -> str:
    """Return /etc/hosts: the controller and all nodes are this machine."""
    return f"127.0.0.1 localhost ctl {' '.join(shape.node_names)}\n::1 localhost\n"
