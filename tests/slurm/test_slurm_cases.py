"""The cases of `slurm_cases.py` on a real Slurm, through every gateway that can group."""

import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from gateway_inside import GatewayInside, RefusedError
from slurm_cases import CASES

from muri.slurm_plugin.gateway import base
from muri.slurm_plugin.planning.arrays import task_numbers
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Node

_SETTLED_S = 3.0


class RealWorld:
    """A sandbox behind one gateway."""

    def __init__(self, inside: GatewayInside) -> None:
        self._inside = inside
        self._driver = inside.driver

    def submit(self, *, gpus: int = 0, node: str = "", hold: bool = False, begin_in_s: int = 0, requeue: bool = True,
               cpus: int = 1, seconds: int = 600, minutes: int = 0, dependency: str = "",
               licence: str = "", tasks: int = 0, at_once: int = 0) -> int:  # fmt: skip
        options = [
            "--output=/dev/null", "--requeue" if requeue else "--no-requeue", f"--cpus-per-task={cpus}",
            *([f"--gres=gpu:{gpus}"] if gpus else []), *([f"--nodelist={node}"] if node else []),
            *(["--hold"] if hold else []), *([f"--begin=now+{begin_in_s}"] if begin_in_s else []),
            *([f"--time={minutes}"] if minutes else []), *([f"--dependency={dependency}"] if dependency else []),
            *([f"--licenses={licence}"] if licence else []),
            *([f"--array=1-{tasks}{f'%{at_once}' if at_once else ''}"] if tasks else []),
        ]  # fmt: skip
        return self._driver.submit(*options, f"--wrap=exec sleep {seconds}")

    def job(self, job_id: int) -> Job:
        return self._inside.job(job_id)

    def node(self, name: str) -> Node:
        return next(node for node in self._inside.snapshot().nodes if node.name == name)

    def wait(self, job_id: int, state: JobState) -> None:
        self._driver.wait_state(job_id, state.value)

    def settle(self) -> None:
        time.sleep(_SETTLED_S)

    def call(self, method: str, *arguments: Any) -> None:
        if method == "extend_lease_by":
            method, arguments = "extend_lease", (time.time() + arguments[0],)
        plain = [asdict(each) if isinstance(each, JobChange) else each for each in arguments]
        try:
            # The controller has always looked at the queue before: that says which record of an array is meant.
            self._inside.call(*([] if method == "cancel" else [("snapshot",)]), (method, *plain))
        except RefusedError as refused:
            raise getattr(base, refused.error)(refused.text) from refused

    def split_first(self, job_id: int, count: int) -> None:
        record = self.job(job_id)
        self._inside.call(("split_tasks", asdict(record), list(task_numbers(record.array_tasks))[:count]))

    def release_by_user(self, job_id: int) -> None:
        self._driver.run("scontrol", "release", str(job_id), user="alice")

    def hold_by_admin(self, job_id: int) -> None:
        self._driver.run("scontrol", "hold", str(job_id), user="root")


@pytest.fixture(params=["pyslurm-26.05", "command-26.05", "command-24.11"])
def world(request: pytest.FixtureRequest) -> Iterator[RealWorld]:
    for inside in GatewayInside.named(request.param, request):
        yield RealWorld(inside)
        inside.call(("end_lease",))


@pytest.mark.parametrize("case", CASES, ids=lambda case: re.sub("_", "-", case.__name__))
def test_slurm(world: RealWorld, case: Any) -> None:
    case(world)
