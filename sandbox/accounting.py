"""Accounting in a sandbox: MariaDB and slurmdbd, and in them the cluster's accounts, users and QOS."""

import time
from dataclasses import dataclass

from sandbox import instance as instances
from sandbox.builds import USERS
from sandbox.cluster import DATABASE_CONFIG, cluster_name
from sandbox.daemons import last_log_lines, require
from sandbox.instance import Instance
from sandbox.support import StartError

#: Every user is in each account; the first is the one a job without `--account` belongs to.
ACCOUNTS = ("hep", "astro")
_MARIADB_LOG = "/var/log/mariadbd.log"
LOG = "/var/log/slurmdbd.log"
_LOGS = (_MARIADB_LOG, LOG)


@dataclass(frozen=True)
class Qos:
    """A quality of service beside `normal`, which has no limit, and its limit in the notation of sacctmgr."""

    name: str
    limit: str


QOS = (Qos("short", "MaxWall=01:00:00"), Qos("small", "MaxTRESPerUser=gres/gpu=2"))


def start(instance: Instance, slurm_user: str) -> None:
    """Start the database and register the cluster, without which its slurmctld refuses to start.

    Args:
        instance: The sandbox.
        slurm_user: Who slurmdbd runs as; the database knows it by its uid.

    Raises:
        StartError: A step failed; the text holds the logs.
    """
    _start_mariadb(instance)
    if slurm_user != "root":
        create = f"CREATE USER {slurm_user}@localhost IDENTIFIED VIA unix_socket"
        grant = f"GRANT ALL ON slurm_acct_db.* TO {slurm_user}@localhost"
        require(instance, "mariadb", "--execute", f"{create}; {grant}", logs=_LOGS)
    require(instance, "slurmdbd", logs=_LOGS)
    _wait_for(instance, "sacctmgr", "--noheader", "show", "cluster")
    _register_cluster(instance)


def set_limits(instance: Instance) -> None:
    """Give the QOS their limits; only once slurmctld runs does the database know GPUs."""
    for qos in QOS:
        _sacctmgr(instance, "modify", "qos", qos.name, "set", qos.limit)


def _start_mariadb(instance: Instance) -> None:
    config = f"--defaults-file={DATABASE_CONFIG}"
    # Only the system's root may connect, through the socket.
    install = ("mariadb-install-db", config, "--skip-test-db", "--auth-root-authentication-method=socket")
    require(instance, *install, logs=())
    require(instance, "sh", "-c", f"setsid mariadbd {config} </dev/null >{_MARIADB_LOG} 2>&1 &", logs=())
    # slurmdbd of Slurm 26.05 ends if it has to make its database itself, because of a fault in libmariadb 3.4.10.
    _wait_for(instance, "mariadb", "--execute", "CREATE DATABASE IF NOT EXISTS slurm_acct_db")


def _register_cluster(instance: Instance) -> None:
    accounts, users, qos = ",".join(ACCOUNTS), ",".join(USERS), ",".join(["normal", *(qos.name for qos in QOS)])
    _sacctmgr(instance, "add", "cluster", cluster_name(instance.name))
    _sacctmgr(instance, "add", "account", accounts)
    _sacctmgr(instance, "add", "qos", ",".join(qos.name for qos in QOS))
    _sacctmgr(instance, "add", "user", users, f"account={accounts}", f"defaultaccount={ACCOUNTS[0]}")
    _sacctmgr(instance, "modify", "user", "where", f"name={users}", "set", f"qos={qos}", "defaultqos=normal")


def _sacctmgr(instance: Instance, *arguments: str) -> None:
    require(instance, "sacctmgr", "--immediate", *arguments, logs=_LOGS)


def _wait_for(instance: Instance, *command: str, deadline_s: float = 60.0) -> None:
    """Repeat a command until it succeeds, for a daemon that is starting."""
    limit = time.monotonic() + deadline_s
    while (done := instances.run(instance, *command)).returncode != 0:
        if time.monotonic() > limit:
            raise StartError(
                f"`{' '.join(command)}` did not succeed within {deadline_s:.0f} s of the daemon's start:\n"
                f"{done.stderr.strip()}\n{last_log_lines(instance, _LOGS)}"
            )
        time.sleep(0.1)
