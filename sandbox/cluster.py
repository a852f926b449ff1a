"""The parts of a sandbox: a Debian suite with its Slurm, nodes, partitions; and the configuration that follows."""

import functools
import hashlib
import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from sandbox.support import CHECKOUT, UsageError, node_names

#: Raise this when a build step changes in a way that the packages don't show.
BUILD_VERSION = 2

#: Libraries the standard library's extension modules of a Python from outside need (sqlite3, ctypes, …).
_PYTHON_LIBRARIES = ("libsqlite3-0", "libffi8", "libexpat1", "libuuid1")
_SLURM = ("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "libslurm-dev")
#: Slurm is built with these, for the plugins that a sandbox uses.
_SLURM_FROM_SOURCE = (
    "libmunge-dev", "liblua5.3-dev", "libjson-c-dev", "libyaml-dev", "libjwt-dev", "libdbus-1-dev",
    "libmariadb-dev", "libssl-dev", "libpam0g-dev", "libreadline-dev", "pkg-config", "autoconf",
)  # fmt: skip
#: What Slurm's own tests need.
_SLURM_TESTS = (
    "bc", "expect", "mariadb-client", "perl", "psmisc", "python3-jsondiff", "python3-jsonpatch", "python3-pexpect",
    "python3-pytest", "python3-requests", "python3-yaml", "rsync", "sudo",
)  # fmt: skip
#: For `--accounting`. Every root has them, so that a suite needs one build only.
_ACCOUNTING = ("mariadb-server-core", "mariadb-client-core")
_TOOLS = ("gcc", "libc6-dev", "make", "procps", "ca-certificates", "munge")
#: The suite's own Python, for Muri's packages.
_SITE = ("python3", "python3-venv")
#: They make users and directories where systemd is not installed; newer suites' Slurm brings it.
_STANDALONE = ("systemd-standalone-sysusers", "systemd-standalone-tmpfiles")
_TEMPLATES = CHECKOUT / "etc/sandbox"
_FIRST_NODE_PORT = 17001

_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none"

#: Nodes without a slurmd.
_CLOUD_GPUS, _CLOUD_CPUS, _CLOUD_MEM_MIB = 8, 64, 512_000

#: Without a program that switches nodes on and off slurmctld refuses nodes of a cloud.
_POWER_SAVING = (
    "SuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=86400\nResumeTimeout=36000\n"
    "SuspendExcNodes={served}"
)

#: Jobs start within about a second of being submitted or released.
_SCHEDULER = "batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=1,bf_continue"

#: With tens of thousands of jobs looking at all of them every second would keep slurmctld from answering.
_SCHEDULER_OF_MANY = (
    "defer,batch_sched_delay=1,sched_min_interval=1000000,sched_interval=5,default_queue_depth=200,"
    "bf_interval=30,bf_continue,bf_max_job_test=500"
)

#: MariaDB's configuration inside the sandbox.
DATABASE_CONFIG = "/etc/mysql/sandbox.cnf"
SLURMDBD_CONFIG = "/etc/slurm/slurmdbd.conf"

#: Slurm's default of `cred_expire`.
SLURM_CRED_EXPIRE_S = 120


@dataclass(frozen=True)
class Suite:
    """One Debian release with its Slurm.

    Attributes:
        script: The debootstrap script that knows how to install the suite.
        auth: Slurm's authentication plugin; munge runs a daemon of its own.
        cgroup_conf: Content of cgroup.conf. Slurm 22.05 has no "disabled" cgroup plugin, and needs none
            as long as no plugin that uses cgroups is configured.
        slurm: The packages of Slurm, or of what builds it from source.
        debian: The Debian release, where the name is not that.
        built: The directory of a root in the cache whose Slurm was built from source, "" for Debian's own.
    """

    name: str
    script: str
    auth: str
    cgroup_conf: str
    extra_packages: tuple[str, ...] = ()
    slurm: tuple[str, ...] = _SLURM
    debian: str = ""
    built: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """Every package the root file system gets on top of debootstrap's minimal base."""
        return tuple(sorted({*self.slurm, *_ACCOUNTING, *_TOOLS, *_SITE, *_PYTHON_LIBRARIES, *self.extra_packages}))

    @property
    def recipe_hash(self) -> str:
        """Names the cached build: the same recipe gives the same name."""
        parts = (str(BUILD_VERSION), self.name, self.script, mirror(), *self.packages)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


SUITES = {
    "forky": Suite("forky", "sid", "slurm", "CgroupPlugin=disabled\n", extra_packages=("libreadline8t64",)),
    # rpm, so that Muri's .rpm packages are tried, too: on the suite on which groups form without pyslurm.
    "trixie": Suite("trixie", "sid", "munge", "CgroupPlugin=disabled\n", extra_packages=("libreadline8t64", "rpm")),
    "bookworm": Suite("bookworm", "bookworm", "munge", "", extra_packages=("libreadline8", *_STANDALONE)),
}


#: On which Slurm is built from source. Any release of it: what these cannot do is probed.
SOURCE_BASE = Suite(
    "source",
    "bookworm",
    "slurm",
    "CgroupPlugin=disabled\n",
    ("libreadline8", *_STANDALONE, *_SLURM_TESTS),
    _SLURM_FROM_SOURCE,
    "bookworm",
)


def mirror() -> str:
    """Where Debian packages come from: `$MURI_DEBIAN_MIRROR`, or the mirror that this machine's apt uses.

    Raises:
        UsageError: Neither is known.
    """
    named = os.environ.get("MURI_DEBIAN_MIRROR") or _mirror_of_apt()
    if not named:
        raise UsageError("apt on this machine names no Debian mirror: set MURI_DEBIAN_MIRROR to the address of one")
    return named.rstrip("/")


@functools.cache
def _mirror_of_apt() -> str:
    """The first source of apt that holds a whole release, not its security or other updates; "" if none."""
    command = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    sources = [line.split() for line in listed.splitlines() if len(line.split()) == 2]
    return next((address for release, address in sources if "-" not in release), "")


@dataclass(frozen=True)
class Partition:
    """A partition.

    Attributes:
        nodes: Their names, in Slurm's notation.
        max_time: The longest time limit of a job there, in Slurm's notation.
        jobs_per_cpu: How many jobs that ask for it may hold a CPU at once, as in `OverSubscribe=YES:8`;
            1: none shares, `OverSubscribe=NO`.
    """

    name: str
    nodes: str
    max_time: str = "INFINITE"
    jobs_per_cpu: int = 8

    @property
    def oversubscribe(self) -> str:
        """Return the value of `OverSubscribe` in slurm.conf."""
        return f"YES:{self.jobs_per_cpu}" if self.jobs_per_cpu > 1 else "NO"


SITE_PARTITIONS = (Partition("gpu", "ALL", "2-00:00:00"), Partition("debug", "ALL", "01:00:00"))


@dataclass(frozen=True)
class Shape:
    """How large the virtual cluster is.

    Attributes:
        cpus_per_node: Virtual CPUs. They are bookkeeping only; a group's pilot job and its members
            all need some on one node, so there are more than GPUs.
        mem_mib_per_node: Virtual memory of a node in MiB, bookkeeping as well.
        extra_partitions: Partitions beside `main`, which holds all nodes; a site has `gpu` and `debug` instead.
        cred_expire_s: How long a requeued job waits before Slurm starts it again. It is shorter than Slurm's own
            `SLURM_CRED_EXPIRE_S`, so that what requeues jobs is quick to try.
        accounting: With a database, accounts, QOS, enforced limits and multifactor priority. The first half of
            the nodes then has the feature a100, the second v100.
        site: As on a site: a login host and nodes with file systems of their own, munge, daemons that run as the user
            slurm, typed GPUs, a reservation. It has accounting as well.
        bare: Nothing of Muri is installed, for trying an installation.
        constrained: A site's jobs can open the GPUs that they were given and no others, by cgroups of this version,
            "v1" or "v2"; "": they can open all.
        island_gpus: GPUs that gres.conf says are linked with each other, as by NVLink; 0: it says nothing.
        cloud_nodes: Nodes of 8 GPUs beside those that have a slurmd. Slurm plans with them as with nodes of a cloud
            that are switched off; a job that starts there stays in CONFIGURING.
    """

    nodes: int = 4
    gpus_per_node: int = 2
    cpus_per_node: int = 16
    mem_mib_per_node: int = 64_000
    extra_partitions: tuple[Partition, ...] = ()
    cred_expire_s: int = 10
    accounting: bool = False
    site: bool = False
    bare: bool = False
    constrained: str = ""
    cloud_nodes: int = 0
    island_gpus: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that are out of range."""
        if self.site and not self.accounting:
            raise UsageError("a site has accounting: give both")
        if self.constrained and not self.site:
            raise UsageError("only a site's devices can be constrained: give --site as well")
        for option, value, least, most in (
            ("--nodes", self.nodes, 1, 64),
            ("--gpus-per-node", self.gpus_per_node, 1, 16),
            ("--cpus-per-node", self.cpus_per_node, 1, 1024),
            ("--cloud-nodes", self.cloud_nodes, 0, 10_000),
            ("--island-gpus", self.island_gpus, 0, self.gpus_per_node),
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
    def cloud_range(self) -> str:
        """Return the nodes without a slurmd in Slurm's notation, "" where there are none."""
        return f"c[1-{self.cloud_nodes}]" if self.cloud_nodes else ""

    @property
    def host_names(self) -> tuple[str, ...]:
        """Return the hosts beside the controller that have a root of their own."""
        return ("login", *self.node_names) if self.site else ()

    @property
    def slurm_user(self) -> str:
        """Return the user that slurmctld and slurmdbd run as."""
        return "slurm" if self.site else "root"

    def auth(self, suite: Suite) -> str:
        """Return Slurm's authentication plugin: a site has munge with every release."""
        return "munge" if self.site else suite.auth

    @property
    def device_files(self) -> tuple[str, ...]:
        """Return the stand-ins for /dev/nvidia0, …; Slurm wants a file per GPU. All nodes share the same."""
        return tuple(f"/dev/muri-gpu{number}" for number in range(self.gpus_per_node))


def parse_partition(text: str) -> Partition:
    """Read `NAME=NODES` or `NAME=NODES:JOBS_PER_CPU`, such as `small=n[1-2]` or `small=n[1-2]:1`."""
    parts = re.fullmatch(r"(\w+)=([^:]+)(?::([1-9]\d{0,2}))?", text)
    if not (parts and parts[1].isidentifier()):
        raise UsageError(
            f"--partition {text!r} is malformed: write NAME=NODES or NAME=NODES:JOBS_PER_CPU, for example small=n[1-2] "
            "or small=n[1-2]:1"
        )
    partition = Partition(parts[1], parts[2])
    return replace(partition, jobs_per_cpu=int(parts[3])) if parts[3] else partition


def with_partitions(shape: Shape, texts: list[str]) -> Shape:
    """Add partitions given on the command line."""
    return replace(shape, extra_partitions=tuple(parse_partition(text) for text in texts))


def cluster_name(instance: str) -> str:
    """Return the name of an instance's cluster as Slurm knows it."""
    return f"muri-{instance}".lower()


def slurm_files(shape: Shape, suite: Suite, instance: str) -> dict[str, str]:
    """Return every configuration file under /etc/slurm by its path."""
    slurm_conf = _template(
        "slurm.conf",
        cluster=cluster_name(instance),
        auth=shape.auth(suite),
        slurm_user=shape.slurm_user,
        proctrack="cgroup" if shape.constrained else "linuxproc",
        task="cgroup" if shape.constrained else "none",
        cred_expire_s=shape.cred_expire_s,
        accounting=_accounting(shape),
        mem_mib_per_cpu=max(1, shape.mem_mib_per_node // (2 * shape.cpus_per_node)),
        scheduler=_SCHEDULER_OF_MANY if shape.cloud_nodes else _SCHEDULER,
        nodes=_node_lines(shape),
        partitions=_partition_lines(shape),
    )
    of_shape = "site/" if shape.site else ""
    files = {
        "slurm.conf": slurm_conf,
        "gres.conf": _template("gres.conf", nodes=shape.node_range, gpus=_gpu_gres(shape), cloud=_cloud_gres(shape)),
        "job_submit.lua": _text(f"{of_shape}job_submit.lua"),
        "cli_filter.lua": _text(f"{of_shape}cli_filter.lua"),
        "plugstack.conf": _text(f"{of_shape}plugstack.conf"),
        "cgroup.conf": _cgroup_conf(shape.constrained) if shape.constrained else suite.cgroup_conf,
    }
    if shape.bare:
        files |= {"job_submit.lua": _text("site/job_submit.lua"), "plugstack.conf": _text("site/plugstack.conf")}
        files |= {name: _without_muri(files[name]) for name in ("slurm.conf", "gres.conf")}
        del files["cli_filter.lua"]
    elif shape.site:
        files["plugstack.conf.d/muri.conf"] = _text("plugstack.conf")
        files |= {name: _with_muri(files[name], name) for name in ("job_submit.lua", "cli_filter.lua")}
    return {str(Path("/etc/slurm", name)): text for name, text in files.items()}


def _cgroup_conf(version: str) -> str:
    without_systemd = "IgnoreSystemd=yes" if version == "v2" else ""
    return _template("site/cgroup.conf", version=version, without_systemd=without_systemd)


def _with_muri(own: str, name: str) -> str:
    """Return a site's Lua file with what loads Muri's before its last line, as in the ordinary sandbox's."""
    loads = _text(name).partition("local ready")
    return own.removesuffix("return slurm.SUCCESS\n") + "".join(loads[1:])


def _without_muri(text: str) -> str:
    """Return slurm.conf or gres.conf as a site has it that does not know Muri."""
    lines = (line for line in text.splitlines(keepends=True) if " Name=muri " not in line and "`muri" not in line)
    return re.sub(r"muri_gate:1000000,|,muri(:64)?\b|CliFilterPlugins=lua\n", "", "".join(lines))


def database_files(shape: Shape, suite: Suite) -> dict[str, str]:
    """Return the configuration files of slurmdbd and MariaDB by their paths; only slurmdbd may read its own."""
    return {
        SLURMDBD_CONFIG: _template("slurmdbd.conf", auth=shape.auth(suite), slurm_user=shape.slurm_user),
        DATABASE_CONFIG: _template("mariadb.cnf"),
    }


def hosts_file(shape: Shape) -> str:
    """Return /etc/hosts: the controller and all other hosts are this machine."""
    return f"127.0.0.1 localhost ctl {' '.join(shape.host_names or shape.node_names)}\n::1 localhost\n"


def _text(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _template(name: str, **values: object) -> str:
    return Template(_text(name)).substitute({key: str(value) for key, value in values.items()})


def _accounting(shape: Shape) -> str:
    if not shape.accounting:
        return _NO_ACCOUNTING
    tres = ["gres/gpu", *(["gres/gpu:tesla"] if shape.site else []), *([] if shape.bare else ["gres/muri"])]
    return _template("accounting.conf", tres=",".join(tres)).strip()


def _node_lines(shape: Shape) -> str:
    served = (
        f"NodeName={name} NodeAddr=127.0.0.1 Port={_FIRST_NODE_PORT + index} CPUs={shape.cpus_per_node} "
        f"RealMemory={shape.mem_mib_per_node} Gres={_gres(shape, shape.gpus_per_node)} "
        f"{_feature(shape, index)}State=UNKNOWN"
        for index, name in enumerate(shape.node_names)
    )
    return "\n".join([*served, *_cloud_lines(shape)])


def _cloud_lines(shape: Shape) -> list[str]:
    if not shape.cloud_nodes:
        return []
    gres = _gres(shape, _CLOUD_GPUS)
    size = f"CPUs={_CLOUD_CPUS} RealMemory={_CLOUD_MEM_MIB} Gres={gres}"
    nodes = f"NodeName={shape.cloud_range} {size} Weight=10 State=CLOUD"  # jobs go to the served nodes first
    return [nodes, _POWER_SAVING.format(served=shape.node_range)]


def _gpu_gres(shape: Shape) -> str:
    """Return the lines of gres.conf for the stand-in GPUs; Slurm wants a line for each where they have links."""
    start = f"NodeName={shape.node_range} Name=gpu {'Type=tesla ' if shape.site else ''}"
    numbers, size = range(shape.gpus_per_node), shape.island_gpus
    if not size:
        last = shape.gpus_per_node - 1
        return f"{start}File=/dev/muri-gpu{f'[0-{last}]' if last else 0}"

    def links(one: int) -> str:
        return ",".join("-1" if one == other else str(int(one // size == other // size)) for other in numbers)

    return "\n".join(f"{start}File=/dev/muri-gpu{one} Links={links(one)}" for one in numbers)


def _cloud_gres(shape: Shape) -> str:
    """Return the lines of gres.conf for nodes without a slurmd; no device files are looked for there."""
    if not shape.cloud_nodes:
        return ""
    kind = "Type=tesla " if shape.site else ""
    return (
        f"NodeName={shape.cloud_range} Name=gpu {kind}Count={_CLOUD_GPUS}\n"
        f"NodeName={shape.cloud_range} Name=muri Count=64 Flags=CountOnly\n"
    )


def _gres(shape: Shape, gpus: int) -> str:
    return f"gpu:{'tesla:' if shape.site else ''}{gpus},muri:64"


def _feature(shape: Shape, index: int) -> str:
    if not shape.accounting:
        return ""
    return "Feature=a100 " if index < (shape.nodes + 1) // 2 else "Feature=v100 "


def _partition_lines(shape: Shape) -> str:
    own = SITE_PARTITIONS if shape.site else (Partition("main", "ALL"),)
    return "\n".join(
        f"PartitionName={partition.name} Nodes={partition.nodes} Default={'YES' if index == 0 else 'NO'} "
        f"MaxTime={partition.max_time} DefaultTime=60 OverSubscribe={partition.oversubscribe} State=UP"
        for index, partition in enumerate((*own, *shape.extra_partitions))
    )
