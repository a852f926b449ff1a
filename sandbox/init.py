"""The plan of a sandbox's root, and its first process, which makes that root and then reaps orphans until it is killed.

It runs in fresh namespaces (`unshare --mount --pid …`), so every mount made here vanishes with it.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SECOND_ADDRESS = "10.255.0.1"
# CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWCGROUP; Python 3.11 has no os.unshare.
_NEW_MOUNTS, _NEW_HOSTNAME, _NEW_CGROUPS = 0x00020000, 0x04000000, 0x02000000

#: The hierarchy of cgroup v2; those of v1 have the names of their controllers.
UNIFIED = "unified"
#: The hierarchies that Slurm needs to constrain devices, by the version of cgroups.
HIERARCHIES = {"v1": ("devices", "freezer"), "v2": (UNIFIED,)}

#: Stand-ins that are devices of their own: virtual terminals, which open without hardware.
TERMINAL_MAJOR, FIRST_TERMINAL = 4, 40
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

_DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1",
                 "stderr": "/proc/self/fd/2", "ptmx": "pts/ptmx"}  # fmt: skip


@dataclass(frozen=True)
class Bind:
    """A file or directory of the host mounted inside; a missing source is skipped."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class TextFile:
    """A file written inside."""

    path: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True)
class Plan:
    """The root that the first process of a sandbox makes.

    Attributes:
        lower: The cached root file system, never written to.
        mountpoint: Where the root is put together, on the host's path names.
        command: Run inside instead of staying as the reaper of orphans, with `environment`.
        report_fd: File descriptor that receives a `Report` once all roots stand.
        device_files: Stand-ins for GPUs: with `cgroup` a device each, else all /dev/null.
        cgroup: The cgroup that the host has as the root of its `hierarchies`.
        hierarchies: Some of `HIERARCHIES`, or none.
        hosts: The cluster's other machines: each has a root and a host name of its own, and shares the rest.
    """

    lower: str
    mountpoint: str
    binds: tuple[Bind, ...] = ()
    files: tuple[TextFile, ...] = ()
    directories: tuple[str, ...] = ()
    device_files: tuple[str, ...] = ()
    hostname: str = ""
    private_network: bool = False
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = "/"
    report_fd: int | None = None
    cgroup: str = ""
    hierarchies: tuple[str, ...] = ()
    hosts: tuple["Plan", ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can carry."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "Plan":
        """Rebuild a plan from `to_dict`."""
        values = dict(document)
        values["binds"] = tuple(Bind(**item) for item in document["binds"])
        values["files"] = tuple(TextFile(**item) for item in document["files"])
        for name in ("directories", "device_files", "command", "hierarchies"):
            values[name] = tuple(document[name])
        values["hosts"] = tuple(cls.from_dict(item) for item in document["hosts"])
        return cls(**values)


@dataclass(frozen=True)
class Report:
    """The processes that keep a sandbox's namespaces, by their ids on the machine that runs it.

    Attributes:
        pid: The sandbox's first process.
        hosts: The process of each of its other hosts, by the host's name.
    """

    pid: int
    hosts: Mapping[str, int]

    def to_line(self) -> str:
        """Return a line of JSON."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: str) -> "Report":
        """Read what `to_line` wrote."""
        return cls(**json.loads(line))


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def make_root(lower: Path, mountpoint: Path) -> Path:
    """Lay a writable root over the cached one; the writes live in memory and vanish with the namespace."""
    mountpoint.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", "mode=755,size=75%", "muri-sandbox", mountpoint)
    upper, work, root = (mountpoint / part for part in ("upper", "work", "root"))
    for directory in (upper, work, root):
        directory.mkdir(mode=0o755)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    overlay = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "muri-sandbox", str(root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if overlay.returncode != 0:
        print(f"no overlay file system here ({overlay.stderr.strip()}); copying the root instead", flush=True)
        subprocess.run(["cp", "-a", f"{lower}/.", str(root)], check=True)
        _mount("--bind", root, root)
    return root


def target_in(root: Path, path: Path) -> Path:
    """Translate a path of the sandbox to one under `root`, refusing ways out through links."""
    target = root / path.relative_to("/")
    if not Path(os.path.realpath(target.parent)).is_relative_to(root):
        raise OSError(f"{path} leads out of the sandbox's root through a symbolic link")
    return target


def bind(root: Path, item: Bind) -> None:
    """Mount a file or directory of the host at its place in the sandbox."""
    source, target = Path(item.source), target_in(root, Path(item.target))
    if not source.exists():
        return
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    if source.is_dir():
        target.mkdir(mode=0o755, exist_ok=True)
    elif not target.exists():
        target.touch()
    _mount("--bind", source, target)
    if item.read_only:
        _mount("-o", "remount,bind,ro", target)


def write(root: Path, item: TextFile) -> None:
    """Write one file of the plan."""
    target = target_in(root, Path(item.path))
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, item.mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(item.text)
    target.chmod(item.mode)


def make_kernel_file_systems(root: Path) -> None:
    """Mount /proc, /sys and a /dev of its own."""
    _mount("-t", "proc", "proc", root / "proc")
    _mount("--rbind", "/sys", root / "sys")
    dev = root / "dev"
    _mount("-t", "tmpfs", "-o", "mode=755", "dev", dev)
    for name in _DEVICES:
        (dev / name).touch()
        _mount("--bind", f"/dev/{name}", dev / name)
    for name, mode in (("pts", 0o755), ("shm", 0o1777)):
        (dev / name).mkdir()
        (dev / name).chmod(mode)
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620", "devpts", dev / "pts")
    _mount("-t", "tmpfs", "-o", "mode=1777", "shm", dev / "shm")
    for name, link in _DEVICE_LINKS.items():
        (dev / name).symlink_to(link)


def make_devices(root: Path, names: Sequence[str], *, distinct: bool) -> None:
    """Make the stand-ins for GPUs; Slurm insists on character devices."""
    for index, name in enumerate(names):
        stand_in = target_in(root, Path(name))
        if distinct:
            os.mknod(stand_in, stat.S_IFCHR, os.makedev(TERMINAL_MAJOR, FIRST_TERMINAL + index))
            stand_in.chmod(0o666)
        else:
            stand_in.touch()
            _mount("--bind", "/dev/null", stand_in)


def mount_hierarchy(hierarchy: str, place: Path) -> None:
    """Mount a hierarchy of cgroups, which the machine may have mounted or not."""
    place.mkdir(parents=True, exist_ok=True)
    if hierarchy == UNIFIED:
        _mount("-t", "cgroup2", "cgroup2", place)
    else:
        _mount("-t", "cgroup", "-o", hierarchy, "cgroup", place)


def enter_cgroup(name: str, hierarchies: Sequence[str], place: Path) -> None:
    """Move this process into a cgroup in each hierarchy and make that the root of its view."""
    for hierarchy in hierarchies:
        mount_hierarchy(hierarchy, place)
        group = place / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        subprocess.run(["umount", place], check=True)
    _unshare(_NEW_CGROUPS)


def mount_own_cgroups(root: Path, hierarchies: Sequence[str]) -> None:
    """Show the host its own cgroups in place of the machine's."""
    place = root / "sys/fs/cgroup"
    subprocess.run(["umount", "--recursive", "--lazy", place], check=False)  # a machine may have none mounted
    if UNIFIED in hierarchies:
        mount_hierarchy(UNIFIED, place)
        (place / "system.slice").mkdir(exist_ok=True)  # systemd's; Slurm 22.05 expects it
        return
    _mount("-t", "tmpfs", "-o", "mode=755", "cgroup", place)
    for hierarchy in hierarchies:
        mount_hierarchy(hierarchy, place / hierarchy)


def raise_loopback() -> None:
    """Switch on `lo`, which is down in a new network namespace, and give it a second address.

    Slurm resolves names with AI_ADDRCONFIG, for which 127.0.0.1 alone does not count as an address.
    """
    get_flags, set_flags, set_address, interface_up = 0x8913, 0x8914, 0x8916, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = fcntl.ioctl(control, get_flags, struct.pack("16sH14x", b"lo", 0))
        flags = struct.unpack("16sH14x", request)[1]
        fcntl.ioctl(control, set_flags, struct.pack("16sH14x", b"lo", flags | interface_up))
        address = struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(SECOND_ADDRESS))
        fcntl.ioctl(control, set_address, struct.pack("16s16s8x", b"lo:0", address))


def pivot(root: Path) -> None:
    """Make `root` this namespace's / and unmount the host's."""
    old = root / ".host"
    old.mkdir()
    os.chdir(root)
    subprocess.run(["pivot_root", ".", ".host"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "--lazy", "/.host"], check=True)
    Path("/.host").rmdir()


def start_hosts(plans: Sequence[Plan]) -> dict[str, int]:
    """Make the roots of other hosts, all at once; returns the process that keeps each."""
    answers = {plan.hostname: _fork_host(plan) for plan in plans}
    return {name: _read_pid(name, answer) for name, answer in answers.items()}


def _fork_host(plan: Plan) -> int:
    """Start a process that makes a host's root and stays; returns where it writes its process id then."""
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        return reader
    try:
        pid = _pid_outside()
        _unshare(_NEW_MOUNTS | _NEW_HOSTNAME)
        if plan.cgroup:
            enter_cgroup(plan.cgroup, plan.hierarchies, Path(plan.mountpoint))
        apply(plan)
        os.write(writer, str(pid).encode())
        os.close(writer)
        reap_forever()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _unshare(flags: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")


def _read_pid(name: str, descriptor: int) -> int:
    with os.fdopen(descriptor) as answer:
        pid = answer.read()
    if not pid:
        raise OSError(f"the root of the host {name} could not be made")
    return int(pid)


def _pid_outside() -> int:
    # Until the root is changed, /proc is still the machine's, so the link names our process id there.
    return int(str(Path("/proc/self").readlink()))


def apply(plan: Plan) -> dict[str, int]:
    """Carry out the plan; the process ends up inside the new root. Returns the processes of its hosts."""
    root = make_root(Path(plan.lower), Path(plan.mountpoint))
    make_kernel_file_systems(root)
    make_devices(root, plan.device_files, distinct=bool(plan.cgroup))
    if plan.cgroup:
        mount_own_cgroups(root, plan.hierarchies)
    (root / "root").chmod(0o755)
    for directory in plan.directories:
        target_in(root, Path(directory)).mkdir(mode=0o755, parents=True, exist_ok=True)
    for item in plan.binds:
        bind(root, item)
    for text_file in plan.files:
        write(root, text_file)
    hosts = start_hosts(plan.hosts)
    if plan.hostname:
        socket.sethostname(plan.hostname)
    if plan.private_network:
        raise_loopback()
    pivot(root)
    return hosts


def reap_forever() -> None:
    """Collect orphans; SIGTERM ends this process and with it the whole namespace."""
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    while signal.sigwait(watched) != signal.SIGTERM:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


def main(arguments: list[str]) -> int:
    """Apply the plan in the file named first, then run its command or stay as the reaper."""
    document: dict[str, Any] = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    plan = Plan.from_dict(document)
    pid = _pid_outside()
    hosts = apply(plan)
    if plan.command:
        os.chdir(plan.working_directory)
        os.execve(plan.command[0], list(plan.command), dict(plan.environment))
    if plan.report_fd is not None:
        os.write(plan.report_fd, Report(pid, hosts).to_line().encode())
        os.close(plan.report_fd)
    reap_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
