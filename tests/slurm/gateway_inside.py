"""Call a gateway inside a sandbox from a test outside."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, Snapshot, parse_snapshot
from sandbox import instance
from sandbox.driver import Driver

_SERVER = """
import json, os, sys
from muri.errors import MuriError
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, dump_snapshot

records = {"modify": (1, JobChange), "submit": (0, NewJob), "split_tasks": (0, Job)}

def call(gateway, method, arguments):
    if method in records:
        place, kind = records[method]
        arguments[place] = kind(**arguments[place])
    value = getattr(gateway, method)(*arguments)
    return dump_snapshot(value) if method == "snapshot" else value

def answer(request):
    try:
        gateway = open_gateway(request["kind"])
        return {"name": gateway.name, "values": [call(gateway, *each) for each in request["calls"]]}
    except MuriError as error:
        return {"error": type(error).__name__, "text": str(error)}

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
"""


#: The fixture of each release's sandbox, and every gateway there is on each.
SANDBOXES = {"26.05": "sandbox", "24.11": "trixie_sandbox", "22.05": "old_sandbox"}
EVERY_GATEWAY = ("pyslurm-26.05", "command-26.05", "command-24.11", "command-22.05")

#: For what both gateways do by the same code: submissions and the lease.
by_commands = pytest.mark.parametrize("inside", EVERY_GATEWAY[1:], indirect=True)
ALICE, BOB = 1001, 1002


def new_job(script: str = "#!/bin/sh\nexec sleep 600\n", uid: int = ALICE, **fields: Any) -> NewJob:
    """A job of a user's as the controller submits it."""
    values = {"environment": {"PATH": "/usr/bin:/bin"}, "partition": "main", "work_dir": "/tmp", **fields}
    return NewJob(name="tried", uid=uid, gid=uid, script=script, **values)


class Servers:
    """A process in each sandbox that calls gateways: to start one for each call would take most of a test's time."""

    def __init__(self) -> None:
        self._running: dict[str, subprocess.Popen[str]] = {}

    def ask(self, driver: Driver, request: str) -> str:
        server = self._running.get(driver.instance.name)
        if server is None or server.poll() is not None:
            line = instance.command_line(driver.instance, "root", ["python", "-c", _SERVER], "/root")
            server = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._running[driver.instance.name] = server
        assert server.stdin
        assert server.stdout
        print(request, file=server.stdin, flush=True)
        return server.stdout.readline()

    def close(self) -> None:
        for server in self._running.values():
            server.communicate()


class RefusedError(AssertionError):
    """A gateway's error, by the name of its class."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(f"{error}: {text}")
        self.error = error
        self.text = text


class GatewayInside:
    """One kind of gateway on one sandbox. Every call opens it anew, with an environment in a process of its own."""

    def __init__(self, driver: Driver, kind: str, servers: Servers | None = None) -> None:
        self.driver = driver
        self.kind = kind
        self.environment: dict[str, str] = {}
        self._servers = servers

    @classmethod
    def named(cls, name: str, request: pytest.FixtureRequest) -> Iterator["GatewayInside"]:
        """Give one of `EVERY_GATEWAY` with an empty queue, before and after."""
        kind, _, release = name.partition("-")
        driver: Driver = request.getfixturevalue(SANDBOXES[release])
        driver.cancel_all()
        yield cls(driver, kind, request.getfixturevalue("gateway_servers"))
        driver.cancel_all()

    def call(self, *calls: tuple[Any, ...]) -> list[Any]:
        calls_by_name = [[method, list(arguments)] for method, *arguments in calls]
        request = json.dumps({"kind": self.kind, "calls": calls_by_name})
        if self._servers is None or self.environment:
            python = ("python", "-c", _SERVER)
            answer = json.loads(self.driver.run(*python, stdin=request, user="root", env=self.environment).stdout)
        else:
            answer = json.loads(self._servers.ask(self.driver, request))
        if "error" in answer:
            raise RefusedError(answer["error"], answer["text"])
        assert answer["name"] == self.kind
        return list(answer["values"])

    def snapshot(self) -> Snapshot:
        return parse_snapshot(self.call(("snapshot",))[0])

    def job(self, job_id: int) -> Job:
        return next(job for job in self.snapshot().jobs if job.job_id == job_id)

    def submit(self, job: NewJob) -> int:
        return int(self.call(("submit", asdict(job)))[0])

    def modify(self, job_id: int, change: JobChange) -> None:
        self.call(("modify", job_id, asdict(change)))
