"""Makes a sandbox look like a site: hosts with file systems of their own, daemons that do not run as root."""

from dataclasses import replace

from sandbox.accounting import LOG as DATABASE_LOG
from sandbox.cluster import DATABASE_CONFIG, SLURMDBD_CONFIG, Shape
from sandbox.daemons import CONTROLLER_LOG, require
from sandbox.init import HIERARCHIES, Bind, Plan
from sandbox.instance import Instance
from sandbox.support import PYSLURM_TARGET

#: The reservation on a site's last node.
RESERVATION = "course"
_ONLY_ON_CONTROLLER = ("/etc/slurm/job_submit.lua", SLURMDBD_CONFIG, DATABASE_CONFIG)


def host_plans(controller: Plan, shape: Shape, cgroup: str) -> tuple[Plan, ...]:
    """Return the plans of the login host and of the nodes: the suite's packages, the cluster's configuration, /home."""
    home = Bind(f"{controller.mountpoint}/root/home", "/home", read_only=False)
    shared = tuple(bind for bind in controller.binds if bind.target != str(PYSLURM_TARGET))
    return tuple(
        replace(
            controller,
            mountpoint=f"{controller.mountpoint}-{name}",
            hostname=name,
            private_network=False,
            binds=(*shared, home),
            files=tuple(file for file in controller.files if file.path not in _ONLY_ON_CONTROLLER),
            device_files=() if name == "login" else controller.device_files,
            cgroup=f"{cgroup}/{name}" if shape.constrained and name != "login" else "",
            hierarchies=HIERARCHIES[shape.constrained] if shape.constrained and name != "login" else (),
        )
        for name in shape.host_names
    )


def give_to_slurm_user(instance: Instance) -> None:
    """Let slurmctld and slurmdbd, which do not run as root on a site, read and write what is theirs."""
    files = f"{CONTROLLER_LOG} {DATABASE_LOG}"
    script = f"touch {files} && chown slurm:slurm {files} {SLURMDBD_CONFIG} /var/spool/slurmctld"
    require(instance, "sh", "-c", script, logs=())


def reserve(instance: Instance) -> None:
    """Reserve the last node for alice and bob."""
    where = (f"nodes={instance.node_names[-1]}", "starttime=now", "duration=infinite", "users=alice,bob")
    require(instance, "scontrol", "create", "reservation", f"reservationname={RESERVATION}", *where)
