"""The machine's cgroups of a sandbox whose devices are constrained: whether it can have any, and their end."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence

from sandbox import host, namespace
from sandbox.init import FIRST_TERMINAL, HIERARCHIES, TERMINAL_MAJOR, UNIFIED
from sandbox.support import InstancePaths, StartError

# The scripts run in a mount namespace of their own; they need hierarchies whether the machine has them mounted or not.
_MOUNT = f"""
set -e
mount -t tmpfs cgroups /mnt
for hierarchy; do
    mkdir "/mnt/$hierarchy"
    case "$hierarchy" in
    {UNIFIED}) mount -t cgroup2 cgroup2 "/mnt/$hierarchy" ;;
    *) mount -t cgroup -o "$hierarchy" cgroup "/mnt/$hierarchy" ;;
    esac
done
"""
_PROBE = f"""{_MOUNT}
mknod /mnt/device c {TERMINAL_MAJOR} {FIRST_TERMINAL}
exec 3<>/mnt/device
"""
_REMOVE = f"""{_MOUNT}
for group in /mnt/*/"$0"; do
    [ ! -d "$group" ] || find "$group" -depth -type d -exec rmdir {{}} ';'
    [ ! -d "$group" ]
done
"""

# With v2 a program in the kernel says which devices open: this loads the smallest one, `return 1`.
_BPF_CALLS = {"x86_64": 321, "aarch64": 280}
_LOAD_PROGRAM = """
import ctypes, os, struct, sys
def place(buffer):
    return ctypes.addressof(buffer)
code = ctypes.create_string_buffer(struct.pack("<BBhiBBhi", 0xB7, 0, 0, 1, 0x95, 0, 0, 0), 16)
license = ctypes.create_string_buffer(b"GPL")
load, cgroup_device = 5, 15
asked = ctypes.create_string_buffer(struct.pack("<IIQQ", cgroup_device, 2, place(code), place(license)), 128)
if ctypes.CDLL(None, use_errno=True).syscall(int(sys.argv[1]), load, asked, 128) < 0:
    sys.exit("bpf: " + os.strerror(ctypes.get_errno()))
"""


def refusal(version: str = "v1") -> str:
    """Return why this machine cannot constrain devices by this version of cgroups, or nothing if it can."""
    said = complaint(HIERARCHIES[version])
    return (
        said
        and f"devices cannot be constrained on this machine, which gives no cgroups {version} or no devices: {said}"
    )


def complaint(hierarchies: Sequence[str]) -> str:
    """Return what fails first when these hierarchies are mounted and devices opened, nothing if all is well."""
    said = _complaint("sh", "-c", _PROBE, "sh", *hierarchies)
    if said or UNIFIED not in hierarchies:
        return said
    call = _BPF_CALLS.get(platform.machine())
    if call is None:
        return f"bpf: its number on {platform.machine()} is not known"
    return _complaint(str(host.python_executable()), "-c", _LOAD_PROGRAM, str(call))


def remove(paths: InstancePaths) -> None:
    """Remove an instance's cgroups, which outlive its processes.

    Raises:
        StartError: Some are left; the text holds the reason.
    """
    try:
        hosts = json.loads(paths.plan.read_text(encoding="utf-8"))["hosts"]
    except (FileNotFoundError, json.JSONDecodeError):  # `up` was killed before it started anything
        return
    hierarchies = sorted({each for of_host in hosts for each in of_host["hierarchies"]})
    if hierarchies and (said := _complaint("sh", "-c", _REMOVE, paths.cgroup, *hierarchies)):
        raise StartError(f"could not remove the cgroups {paths.cgroup}: {said}")


def _complaint(*command: str) -> str:
    """Run a command; return its output if it failed, "" if it did not."""
    said = ""
    try:
        with namespace.contained(list(command), {**os.environ, "LC_ALL": "C"}) as output:
            said = " ".join(output.read().split())
    except subprocess.CalledProcessError as err:
        return said or str(err)
    return ""
