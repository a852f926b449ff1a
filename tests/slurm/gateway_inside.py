"""Call a gateway inside a sandbox from a test outside."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, Snapshot, parse_snapshot
from sandbox.driver import Driver

_SERVER = """
import json, sys
from muri.errors import MuriError
from muri.slurm_plugin.controller.assemble import open_gateway
from muri.slurm_plugin.records.cluster import Job, JobChange, NewJob, dump_snapshot

request = json.loads(sys.argv[1])
records = {"modify": (1, JobChange), "submit": (0, NewJob), "split_tasks": (0, Job)}

def call(gateway, method, arguments):
    if method in records:
        place, kind = records[method]
        arguments[place] = kind(**arguments[place])
    value = getattr(gateway, method)(*arguments)
    return dump_snapshot(value) if method == "snapshot" else value

try:
    gateway = open_gateway(request["kind"])
    answer = {"name": gateway.name, "values": [call(gateway, *each) for each in request["calls"]]}
except MuriError as error:
    answer = {"error": type(error).__name__, "text": str(error)}
print(json.dumps(answer))
"""


#: The fixture of each release's sandbox, and every gateway there is on each.
SANDBOXES = {"26.05": "sandbox", "24.11": "trixie_sandbox", "22.05": "old_sandbox"}
EVERY_GATEWAY = ("pyslurm-26.05", "command-26.05", "command-24.11", "command-22.05")


class RefusedError(AssertionError):
    """A gateway's error, by the name of its class."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(f"{error}: {text}")
        self.error = error
        self.text = text


class GatewayInside:
    """One kind of gateway on one sandbox. Every call opens it anew, as a fresh process does."""

    def __init__(self, driver: Driver, kind: str) -> None:
        self.driver = driver
        self.kind = kind
        self.environment: dict[str, str] = {}

    @classmethod
    def named(cls, name: str, request: pytest.FixtureRequest) -> Iterator["GatewayInside"]:
        """Give one of `EVERY_GATEWAY` with an empty queue, before and after."""
        kind, _, release = name.partition("-")
        driver: Driver = request.getfixturevalue(SANDBOXES[release])
        driver.cancel_all()
        yield cls(driver, kind)
        driver.cancel_all()

    def call(self, *calls: tuple[Any, ...]) -> list[Any]:
        request = {"kind": self.kind, "calls": [[method, list(arguments)] for method, *arguments in calls]}
        done = self.driver.run("python", "-c", _SERVER, json.dumps(request), user="root", env=self.environment)
        answer = json.loads(done.stdout.splitlines()[-1])
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
