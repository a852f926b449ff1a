"""The cases of `slurm_cases.py` on a real Slurm, through every gateway."""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import slurm_cases
from gateway_inside import EVERY_GATEWAY, GatewayInside, RefusedError
from sandboxes import SECOND_GATEWAY

from muri.slurm_plugin.gateway import base
from muri.slurm_plugin.records.cluster import Job, JobChange, JobState, Node, task_numbers

_SETTLED_S = 3.0


class RealWorld:
    """A sandbox behind one gateway."""

    def __init__(self, inside: GatewayInside) -> None:
        self._inside = inside
        self._driver = inside.driver

    def submit(self, *, gpus: int = 0, node: str = "", hold: bool = False, begin_in_s: int = 0, requeue: bool = True,
               cpus: int = 1, seconds: int = 600, minutes: int = 0, dependency: str = "",
               licenses: str = "", tasks: int = 0, at_once: int = 0, mem_mib: int = 0,
               shares: bool = False) -> int:  # fmt: skip
        options = [
            "--output=/dev/null", "--requeue" if requeue else "--no-requeue", f"--cpus-per-task={cpus}",
            *([f"--gres=gpu:{gpus}"] if gpus else []), *([f"--nodelist={node}"] if node else []),
            *(["--hold"] if hold else []), *([f"--begin=now+{begin_in_s}"] if begin_in_s else []),
            *([f"--time={minutes}"] if minutes else []), *([f"--dependency={dependency}"] if dependency else []),
            *([f"--licenses={licenses}"] if licenses else []), *([f"--mem={mem_mib}"] if mem_mib else []),
            *(["--oversubscribe"] if shares else []),
            *([f"--array=1-{tasks}{f'%{at_once}' if at_once else ''}"] if tasks else []),
        ]  # fmt: skip
        return self._driver.submit(*options, f"--wrap=exec sleep {seconds}")

    def layers(self) -> int:
        return self._inside.snapshot().limits.partition("main").oversubscribe

    def job(self, job_id: int) -> Job:
        return self._inside.job(job_id)

    def node(self, name: str) -> Node:
        return next(node for node in self._inside.snapshot().nodes if node.name == name)

    def wait(self, job_id: int, state: JobState) -> None:
        self._driver.wait_state(job_id, state.value)

    def wait_reason(self, job_id: int, reason: str) -> None:
        self._driver.wait_reason(job_id, reason)

    def until(self, reached: Callable[[], bool]) -> None:
        self._driver.wait_until(reached, "what the case waits for")

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


#: Left to Slurm: the gateway that is not taken where both are there would show it no other way.
SLURMS_OWN = {
    slurm_cases.a_time_limit_is_rounded_up_to_minutes,
    slurm_cases.a_member_runs_beside_the_pilot_that_has_all_gpus,
    slurm_cases.a_job_waits_for_the_start_of_another,
    slurm_cases.gpus_are_given_out_once,
    slurm_cases.jobs_that_share_run_in_layers_of_all_cpus,
    slurm_cases.a_job_that_shares_has_its_cpus_in_one_layer,
    slurm_cases.small_jobs_that_share_fill_the_layers,
    slurm_cases.memory_is_never_shared,
    slurm_cases.a_job_that_shares_starts_beside_none_that_does_not,
    slurm_cases.a_job_that_does_not_share_takes_cpus_that_nobody_has,
    slurm_cases.a_member_with_all_cpus_of_a_node_runs_beside_its_pilot,
    slurm_cases.a_small_job_starts_behind_one_that_waits_for_resources,
    slurm_cases.a_job_goes_to_the_fullest_node_that_has_room,
    slurm_cases.a_job_leaves_neighboring_nodes_together,
    slurm_cases.tasks_of_an_array_leave_the_record_of_those_that_wait,
    slurm_cases.a_task_that_cannot_start_stops_those_behind_it,
    slurm_cases.a_waiting_job_behind_the_license_starts_when_the_lease_ends,
}
#: Slurm 22.05 keeps the GPUs of a waiting job, so that no groups form there, of jobs or of an array's tasks.
OF_GROUPS = {
    slurm_cases.a_member_runs_beside_the_pilot_that_has_all_gpus,
    slurm_cases.a_member_with_all_cpus_of_a_node_runs_beside_its_pilot,
    slurm_cases.a_member_gets_its_own_request_back,
    slurm_cases.tasks_of_an_array_leave_the_record_of_those_that_wait,
    slurm_cases.an_array_is_cancelled_as_a_whole,
    slurm_cases.tasks_get_records_of_their_own_before_they_start,
    slurm_cases.a_task_that_cannot_start_stops_those_behind_it,
}


def combinations() -> Iterator[object]:
    for gateway, case in itertools.product(EVERY_GATEWAY, slurm_cases.CASES):
        if gateway != "command-22.05" or case not in OF_GROUPS:
            marks = SECOND_GATEWAY if gateway == "command-26.05" and case in SLURMS_OWN else []
            yield pytest.param(gateway, case, marks=marks, id=f"{gateway}-{case.__name__.replace('_', '-')}")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[RealWorld]:
    for inside in GatewayInside.named(request.param, request):
        yield RealWorld(inside)
        inside.call(("end_lease",))


@pytest.mark.parametrize(("world", "case"), [*combinations()], indirect=["world"])
def test_slurm(world: RealWorld, case: Callable[[RealWorld], None]) -> None:
    case(world)
