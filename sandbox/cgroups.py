"""The machine's cgroups of a sandbox whose devices are constrained: whether it can have any, and their end."""

import subprocess
from collections.abc import Sequence

from sandbox import namespace
from sandbox.init import CGROUP_CONTROLLERS, FIRST_TERMINAL, TERMINAL_MAJOR
from sandbox.support import InstancePaths, StartError

# Both scripts run in a mount namespace of their own; they need cgroup v1 whether the machine has it mounted or not.
_MOUNT = """
set -e
mount -t tmpfs cgroups /mnt
for controller; do
    mkdir "/mnt/$controller"
    mount -t cgroup -o "$controller" cgroup "/mnt/$controller"
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


def refusal(controllers: Sequence[str] = CGROUP_CONTROLLERS) -> str:
    """Return why this machine cannot constrain devices, or nothing if it can."""
    said = _complaint(_PROBE, "sh", controllers)
    return said and f"devices cannot be constrained on this machine, which gives no cgroups v1 or no devices: {said}"


def remove(paths: InstancePaths) -> None:
    """Remove an instance's cgroups, which outlive its processes.

    Raises:
        StartError: Some are left; the text holds the reason.
    """
    if not paths.plan.exists() or f'"{paths.cgroup}/' not in paths.plan.read_text(encoding="utf-8"):
        return
    if said := _complaint(_REMOVE, paths.cgroup, CGROUP_CONTROLLERS):
        raise StartError(f"could not remove the cgroups {paths.cgroup}: {said}")


def _complaint(script: str, name: str, arguments: Sequence[str]) -> str:
    """Run a script; return its output if it failed, "" if it did not."""
    said = ""
    try:
        with namespace.contained(["sh", "-c", script, name, *arguments]) as output:
            said = " ".join(output.read().split())
    except subprocess.CalledProcessError as err:
        return said or str(err)
    return ""
