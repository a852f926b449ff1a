"""The machine's cgroups of a sandbox whose devices are constrained: whether it can have any, and their end."""

import subprocess

from sandbox import namespace
from sandbox.init import CGROUP_CONTROLLERS, FIRST_TERMINAL, TERMINAL_MAJOR
from sandbox.support import InstancePaths, StartError

# Both scripts run in a mount namespace of their own; they need cgroup v1 whether the machine has it mounted or not.
_PROBE = f"""
set -e
mount -t tmpfs probe /mnt
for controller in {" ".join(CGROUP_CONTROLLERS)}; do
    mkdir "/mnt/$controller"
    mount -t cgroup -o "$controller" cgroup "/mnt/$controller"
done
mknod /mnt/device c {TERMINAL_MAJOR} {FIRST_TERMINAL}
exec 3<>/mnt/device
"""
_REMOVE = f"""
set -e
mount -t tmpfs remove /mnt
for controller in {" ".join(CGROUP_CONTROLLERS)}; do
    mkdir "/mnt/$controller"
    mount -t cgroup -o "$controller" cgroup "/mnt/$controller"
    [ ! -d "/mnt/$controller/$1" ] || find "/mnt/$controller/$1" -depth -type d -exec rmdir {{}} ';'
    [ ! -d "/mnt/$controller/$1" ]
done
"""


def refusal() -> str:
    """Return why this machine cannot constrain devices, or nothing if it can."""
    said = ""
    try:
        with namespace.contained(["sh", "-c", _PROBE]) as output:
            said = output.read()
    except subprocess.CalledProcessError:
        return f"this machine gives no cgroups v1 or no devices: {' '.join(said.split())}"
    return ""


def remove(paths: InstancePaths) -> None:
    """Remove an instance's cgroups, which outlive its processes.

    Raises:
        StartError: Some are left; the text holds the reason.
    """
    if not paths.plan.exists() or f'"{paths.cgroup}/' not in paths.plan.read_text(encoding="utf-8"):
        return
    said = ""
    try:
        with namespace.contained(["sh", "-c", _REMOVE, "sh", paths.cgroup]) as output:
            said = output.read()
    except subprocess.CalledProcessError as err:
        raise StartError(f"could not remove the cgroups {paths.cgroup}: {' '.join(said.split())}") from err
