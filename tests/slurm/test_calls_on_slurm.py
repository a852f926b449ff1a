"""Calls of a cycle, by slurmctld's own count."""

import json
import re

from gateway_inside import GatewayInside
from muri_cluster import MuriCluster

from sandbox.driver import Driver

#: Remote procedures that slurmctld's daemons or sdiag itself call, and no gateway.
BACKGROUND = re.compile(r"REGISTRATION|EPILOG|COMPLETE|STATS_INFO|PING|LAUNCH|CONFIG")

_CYCLES = """
import json, sys
from muri.slurm_plugin.controller.assemble import open_controller, read_config

config = read_config(None).model_copy(update={"gateway": sys.argv[1], "gate": "licence", "partitions": ()})
with open_controller(config) as controller:
    print(json.dumps([dict(controller.cycle().slurm_calls) for _ in range(int(sys.argv[2]))]))
"""


def rpc_counts(driver: Driver) -> dict[str, int]:
    text = driver.run("sdiag", user="root").stdout
    section = text.split("by message type")[1].split("by user")[0]
    found = re.findall(r"(\w+)\s*\(\s*\d+\)\s*count:(\d+)", section)
    return {name: int(count) for name, count in found if not BACKGROUND.search(name)}


def test_a_cycle_that_finds_nothing_to_do_calls_slurm_two_or_three_times(inside: GatewayInside) -> None:
    kind, driver = inside.kind, inside.driver
    site = MuriCluster(driver)
    driver.run("sh", "-c", "for i in $(seq 30); do sbatch -H -o /dev/null --wrap=true; done")

    def cycles(count: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        before = rpc_counts(driver)
        told = json.loads(site.python(_CYCLES, kind, str(count)).stdout.splitlines()[-1])
        after = rpc_counts(driver)
        return told, {name: count - before.get(name, 0) for name, count in after.items()}

    few, many = cycles(2), cycles(7)
    # Opening a controller and its first cycle cost the same both times.
    expected = {"REQUEST_JOB_INFO": 5, "REQUEST_NODE_INFO": 5, "REQUEST_UPDATE_RESERVATION": 5}
    if kind == "command":
        expected["REQUEST_PARTITION_INFO"] = 10  # `squeue` and `scontrol show nodes` ask for them by themselves
    cost = {name: count - few[1].get(name, 0) for name, count in many[1].items()}
    assert {name: count for name, count in cost.items() if count} == expected
    assert many[0][1:] == [{"jobs": 1, "lease": 1, "nodes": 1}] * 6
