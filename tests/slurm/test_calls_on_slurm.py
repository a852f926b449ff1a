"""What a cycle costs slurmctld, by its own count."""

import json
from collections.abc import Iterator

import pytest
from gateway_inside import EVERY_GATEWAY, SANDBOXES
from muri_cluster import MuriCluster
from test_gateway_contract import BACKGROUND, rpc_counts

from sandbox.driver import Driver

_CYCLES = """
import json, sys
from muri.slurm_plugin.controller.assemble import open_controller, read_config

config = read_config(None).model_copy(update={"gateway": sys.argv[1], "gate": "licence", "partitions": ()})
with open_controller(config) as controller:
    print(json.dumps([dict(controller.cycle().slurm_calls) for _ in range(int(sys.argv[2]))]))
"""


@pytest.fixture(params=EVERY_GATEWAY)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Driver]]:
    kind, _, release = request.param.partition("-")
    driver: Driver = request.getfixturevalue(SANDBOXES[release])
    driver.cancel_all()
    yield kind, driver
    driver.cancel_all()
    driver.run("scontrol", "delete", "reservationname=muri_gate", user="root", check=False)


def test_a_cycle_that_finds_nothing_to_do_calls_slurm_two_or_three_times(place: tuple[str, Driver]) -> None:
    kind, driver = place
    site = MuriCluster(driver)
    driver.run("sh", "-c", "for i in $(seq 30); do sbatch -H -o /dev/null --wrap=true; done")

    def cycles(count: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        before = rpc_counts(driver)
        told = json.loads(site.python(_CYCLES, kind, str(count)).stdout.splitlines()[-1])
        after = rpc_counts(driver)
        names = (name for name in after if not BACKGROUND.search(name))
        return told, {name: after[name] - before.get(name, 0) for name in names}

    few, many = cycles(2), cycles(12)
    # Opening a controller and its first cycle cost the same both times.
    expected = {"REQUEST_JOB_INFO": 10, "REQUEST_NODE_INFO": 10, "REQUEST_UPDATE_RESERVATION": 10}
    if kind == "command":
        expected["REQUEST_PARTITION_INFO"] = 20  # `squeue` and `scontrol show nodes` ask for them by themselves
    cost = {name: count - few[1].get(name, 0) for name, count in many[1].items()}
    assert {name: count for name, count in cost.items() if count} == expected
    assert many[0][1:] == [{"jobs": 1, "lease": 1, "nodes": 1}] * 11
