"""Bring a sandbox up and take it down."""

import secrets
import shutil
import time
from dataclasses import replace

from sandbox import accounting, cgroups, cluster, daemons, host, namespace, site
from sandbox.builds import Build, Pyslurm, ensure_pyslurm, ensure_rootfs
from sandbox.cluster import Shape, Suite
from sandbox.init import Bind, Plan, TextFile
from sandbox.instance import Instance, load
from sandbox.support import PYSLURM_TARGET, InstancePaths, Progress, StartError, locked_directory

_SLURM_DIRECTORIES = ("/etc/slurm", "/var/spool/slurmctld", "/var/spool/slurmd", "/run/munge", "/run/mysqld")


def root_plan(name: str, suite: Suite, shape: Shape, built: Build, pyslurm: Pyslurm) -> Plan:
    """Return the plan of an instance's root."""
    files = {**cluster.slurm_files(shape, suite, name), "/etc/hosts": cluster.hosts_file(shape)}
    key_file = "/etc/slurm/slurm.key" if shape.auth(suite) == "slurm" else "/etc/munge/munge.key"
    secret = {key_file: secrets.token_urlsafe(768)[:1024]}
    if shape.accounting:
        secret |= cluster.database_files(shape, suite)
    binds = [*host.python_binds(), *host.project_binds()]
    if shape.bare:  # the suite's packages must be able to write there
        binds = [bind for bind in binds if bind.target != str(host.DIST_PACKAGES)]
    if pyslurm.directory and not shape.bare:
        binds.append(Bind(str(pyslurm.directory), str(PYSLURM_TARGET)))
    plan = Plan(
        lower=str(built.root),
        mountpoint=str(InstancePaths(name).mountpoint),
        binds=tuple(binds),
        files=(
            *(TextFile(path, text) for path, text in files.items()),
            *(TextFile(path, text, 0o600) for path, text in secret.items()),
        ),
        directories=(*_SLURM_DIRECTORIES, *(f"/var/spool/slurmd/{node}" for node in shape.node_names)),
        device_files=shape.device_files,
        hostname="ctl",
        private_network=True,
    )
    return replace(plan, hosts=site.host_plans(plan, shape, InstancePaths(name).cgroup))


def build(suite: Suite, progress: Progress) -> tuple[Build, Pyslurm]:
    """Build what every start of a suite needs and the cache lacks: its root and, where one fits, its pyslurm."""
    host.require_tools({"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"})
    built = ensure_rootfs(suite, progress)
    return built, ensure_pyslurm(built, progress)


def up(name: str, suite: Suite, shape: Shape, progress: Progress) -> tuple[Instance, bool]:
    """Start an instance, building what is missing; a running one is left as it is.

    Returns:
        The instance, and whether it was started just now.
    """
    files = InstancePaths(name)
    built, pyslurm = build(suite, progress)
    with locked_directory(files.directory, progress, f"another process that handles the sandbox {name!r}"):
        present = load(name)
        if present and present.alive and present.phase == "up":
            return present, False
        if present:
            namespace.end(present.pid, present.start_ticks)
        namespace.end_strays(files.plan)
        try:
            return _start(name, suite, shape, built, pyslurm, progress), True
        except BaseException:
            _remove(name)
            raise


def _start(name: str, suite: Suite, shape: Shape, built: Build, pyslurm: Pyslurm,
           progress: Progress) -> Instance:  # fmt: skip
    files = InstancePaths(name)
    if shape.constrained and (reason := cgroups.refusal(shape.constrained)):
        raise StartError(f"{reason}\nWithout --constrain-devices the sandbox can start here.")
    progress.step(f"starting the sandbox {name!r}: Slurm {built.slurm_version}, {shape.nodes} nodes")
    report = namespace.start_plan(root_plan(name, suite, shape, built, pyslurm), files.plan, files.log)
    instance = Instance(
        name, suite.name, built.slurm_version, shape.nodes, shape.gpus_per_node, shape.cpus_per_node,
        report.pid, namespace.start_ticks(report.pid) or 0,
        time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        pyslurm=pyslurm.directory is not None and not shape.bare, pyslurm_reason=pyslurm.reason,
        accounting=shape.accounting, bare=shape.bare, hosts=report.hosts,
    )  # fmt: skip
    instance.save()
    if pyslurm.reason:
        progress.step(pyslurm.reason)
    if not shape.bare:
        daemons.install_cli_filter(instance)
        instance = replace(
            instance,
            spank=daemons.install_spank(instance, progress),
            job_submit=daemons.install_job_submit(instance, progress),
        )
    if shape.constrained == "v2":
        daemons.hide_old_hierarchies(instance)
    _start_daemons(instance, suite, shape, progress)
    instance = replace(instance, phase="up")
    instance.save()
    return instance


def _start_daemons(instance: Instance, suite: Suite, shape: Shape, progress: Progress) -> None:
    if shape.auth(suite) == "munge":
        daemons.start_munge(instance)
    if shape.site:
        site.give_to_slurm_user(instance)
    if shape.accounting:
        accounting.start(instance, shape.slurm_user)
    daemons.start(instance, progress)
    if shape.accounting:
        accounting.set_limits(instance)
    if shape.site:
        site.reserve(instance)


def down(name: str, progress: Progress) -> bool:
    """Take an instance down, leaving no process, mount or file; returns whether there was one."""
    files = InstancePaths(name)
    if not files.directory.exists():
        return False
    with locked_directory(files.directory, progress, f"another process that handles the sandbox {name!r}"):
        existed = load(name) is not None
        _remove(name)
    return existed


def _remove(name: str) -> None:
    instance = load(name)
    if instance:
        namespace.end(instance.pid, instance.start_ticks)
    namespace.end_strays(InstancePaths(name).plan)
    cgroups.remove(InstancePaths(name))
    shutil.rmtree(InstancePaths(name).directory, ignore_errors=True)
    if InstancePaths(name).directory.exists():
        raise StartError(f"could not remove {InstancePaths(name).directory}; is something in it still open?")
