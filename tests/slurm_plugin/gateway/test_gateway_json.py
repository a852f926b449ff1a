"""The JSON of two real Slurm versions, recorded by tests/slurm/record_fixtures.py, read into the same records."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from muri.slurm_plugin.gateway import json_records
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.records.cluster import Job, JobState

FIXTURES = Path(__file__).parents[1] / "fixtures"
VERSIONS = ["22.05.8", "26.05.5"]


def document(kind: str, version: str) -> Any:
    text = (FIXTURES / f"{kind}-{version}.json").read_text(encoding="utf-8")
    return json_records.parse_document(text, kind)


def jobs(version: str) -> dict[str, Job]:
    output = (FIXTURES / f"jobs-{version}.json").read_bytes()
    return {job.name: job for job in json_records.read_queue(output, "squeue", taken_s=0.0).jobs}


@pytest.mark.parametrize("version", VERSIONS)
def test_gpus_of_every_way_to_ask(version: str) -> None:
    assert {name: (job.gpu_count, job.gpu_request) for name, job in jobs(version).items()} == {
        "failed": (0, ""),
        "running": (2, "gres/gpu:2"),
        "per-job": (2, ""),
        "per-node": (2, "gres/gpu:1"),
        "per-task": (2, ""),
        "bare": (1, "gres/gpu:1"),
        "details": (0, ""),
        "array": (0, ""),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_states_times_and_holds(version: str) -> None:
    named = jobs(version)
    failed, running, held = named["failed"], named["running"], named["bare"]
    assert (failed.state, failed.exit_code) == (JobState.FAILED, 3)
    assert 0 < failed.submit_s <= failed.start_s <= failed.end_s
    assert (running.state, running.held, running.reason, running.nodes, running.end_s) == (
        JobState.RUNNING, False, "", "n1", 0,
    )  # fmt: skip
    assert (held.state, held.held, held.reason, held.start_s) == (JobState.PENDING, True, "JobHeldUser", 0)
    array = named["array"]
    assert (array.array, array.array_job_id, array.array_tasks, array.array_limit) == (True, array.job_id, "1-3", 0)
    assert (held.array_job_id, held.array_tasks) == (0, "")
    assert named["array"].time_limit_s == 0
    assert not held.array


@pytest.mark.parametrize("version", VERSIONS)
def test_details_of_a_job(version: str) -> None:
    job = jobs(version)["details"]
    assert (job.user, job.uid, job.gid, job.partition, job.work_dir) == ("alice", 1001, 1001, "main", "/home/alice")
    assert (job.cpu_count, job.cpus_per_task, job.mem_per_node_mib, job.time_limit_s) == (3, 3, 500, 5400)
    assert (job.required_nodes, job.dependency, job.node_count) == ("n2", "after:2+5,afterany:2", 1)
    assert (job.batch, job.het, job.can_requeue, job.restart_count) == (True, False, True, 0)


def test_both_versions_give_the_same_records() -> None:
    old, new = (
        [replace(job, submit_s=0, start_s=0, end_s=0, submit_line="", priority=1) for job in jobs(version).values()]
        for version in VERSIONS
    )
    assert old == new


@pytest.mark.parametrize("version", VERSIONS)
def test_nodes(version: str) -> None:
    nodes = {node.name: node for node in json_records.nodes(document("nodes", version))}
    assert {name: node.usable for name, node in nodes.items()} == {"n1": True, "n2": True, "n3": True, "n4": False}
    assert nodes["n4"].state == "IDLE+DRAIN"
    assert (nodes["n1"].gpu_count, nodes["n1"].gpus_allocated, nodes["n1"].cpus_allocated) == (2, 2, 1)
    assert (nodes["n2"].gpus_allocated, nodes["n2"].cpu_count, nodes["n2"].gpu_type) == (0, 16, "gpu")
    assert nodes["n2"].partitions == ("main",)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5),
        (None, 7),
        (4_294_967_294, 7),
        (0xFFFF_FFFF_FFFF_FFFE, 7),
        ({"set": True, "infinite": False, "number": 5}, 5),
        ({"set": False, "infinite": False, "number": 5}, 7),
        ({"set": True, "infinite": True, "number": 0}, 7),
        ({"number": 3}, 3),
        (True, 7),
        ("5", 7),
    ],
)
def test_number_in_every_form(value: object, expected: int) -> None:
    assert json_records.number(value, 7) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "did not print JSON"),
        ("[]", "not an object"),
        ('{"errors": [{"description": "no such thing"}]}', "no such thing"),
    ],
)
def test_output_that_is_no_answer(text: str, said: str) -> None:
    with pytest.raises(GatewayError, match=said):
        json_records.parse_document(text, "squeue --json")
    with pytest.raises(GatewayError, match="did not print JSON" if text == "[]" else said):
        json_records.read_queue(text.encode(), "squeue --json", 0.0)


def test_document_of_an_unknown_form_is_not_an_empty_queue() -> None:
    with pytest.raises(GatewayError, match="'jobs'"):
        json_records.read_queue(b'{"queue": []}', "squeue", 0.0)
    with pytest.raises(GatewayError, match="'nodes'"):
        list(json_records.nodes({"sinfo": []}))


@pytest.mark.parametrize(
    ("name", "value"),
    [("user_id", None), ("job_state", {"x": 1}), ("tres_per_node", "gres/gpu:" + "9" * 5000), ("priority", 1e400)],
)
def test_broken_record_costs_itself(name: str, value: object) -> None:
    content = json.loads((FIXTURES / "jobs-26.05.5.json").read_text(encoding="utf-8"))
    record = content["jobs"][1]
    record[name] = value
    content["jobs"].append("no record")
    queue = json_records.read_queue(json.dumps(content).encode(), "squeue", 0.0)
    broken = [each.job_id for each in queue.unreadable]
    assert broken == ([0] if name == "job_state" else [record["job_id"], 0])
    assert len(queue.jobs) + len(queue.unreadable) == len(content["jobs"])
    assert all("cannot be read" in each.why for each in queue.unreadable)


def test_numbers_are_bounded() -> None:
    record = next(job for job in document("jobs", "26.05.5")["jobs"] if job["name"] == "per-node")
    record |= {"node_count": 2 * 10**9, "tres_req_str": "node=2000000000", "tasks": 10**18, "restart_cnt": -4}
    job = json_records.job(record, 0.0)
    assert (job.node_count, job.gpu_count, job.restart_count) == (10**6, 10**6, 0)
    assert json_records.job(record | {"submit_time": 10**300}, 0.0).submit_s == 2**53 - 1


@pytest.mark.parametrize("version", VERSIONS)
def test_ordinary_requests_are_not_special(version: str) -> None:
    special = {name: job.special for name, job in jobs(version).items() if job.special}
    assert special == {"per-job": ("--gpus",), "per-task": ("--gpus-per-task",)}


@pytest.mark.parametrize(
    ("fields", "special"),
    [
        ({"shared": ["none"]}, ("--exclusive",)),
        ({"shared": "user"}, ("--exclusive=user",)),
        ({"shared": ["oversubscribe"]}, ("--oversubscribe",)),
        ({"core_spec": 32769}, ("--core-spec",)),
        ({"core_spec": 0, "thread_spec": 1}, ("--core-spec",)),
        ({"cpus_per_tres": "gpu:3", "memory_per_tres": "gpu:3000"}, ()),  # the partition's defaults
        ({"cpus_per_tres": "gres:gpu:3"}, ("--cpus-per-gpu",)),
        ({"memory_per_tres": "gres/gpu:1024"}, ("--mem-per-gpu",)),
        ({"memory_per_node": 0, "memory_per_cpu": None, "flags": ["JOB_MEM_SET"]}, ("--mem",)),
        ({"memory_per_node": 0, "memory_per_cpu": None, "flags": []}, ()),
        ({"tres_per_node": "gres/gpu:1,gres/nic:1"}, ("--gres",)),
        ({"tres_per_node": "gres/gpu:1,gres/muri:1"}, ("--gres",)),
        ({"tres_per_node": "gres/gpu:0,gres/muri:1"}, ()),
        ({"tres_per_node": "gres/gpu:a:1,gres/gpu:b:1"}, ("--gres",)),
        ({"partition": "main,small"}, ("--partition",)),
        ({"max_nodes": 4}, ("--nodes",)),
        ({"max_nodes": 2, "tasks": 2, "cpus": 2}, ()),  # Slurm's own bound
        ({"minimum_cpus_per_node": 8}, ("--mincpus",)),
        ({"tasks": 2}, ("--overcommit",)),
        ({"wckey": "*default"}, ()),
        ({"wckey": "x", "mcs_label": "alice"}, ("--wckey",)),
        ({"flags": ["SPREAD_JOB", "GRES_ENFORCE_BIND"]}, ("--gres-flags", "--spread-job")),
        ({"contiguous": True, "network": "x", "deadline": 7, "required_switches": 1},
         ("--contiguous", "--deadline", "--network", "--switches")),
    ],
)  # fmt: skip
def test_options_that_muri_does_not_carry_over(fields: dict[str, object], special: tuple[str, ...]) -> None:
    record = next(job for job in document("jobs", "26.05.5")["jobs"] if job["name"] == "bare")
    assert json_records.job(record | fields, 0.0).special == special


@pytest.mark.parametrize(
    ("forms", "form"),
    [
        ("", "--json"),
        ("data_parser/v0.0.43\ndata_parser/v0.0.44\n", "--json"),
        ("data_parser/v0.0.44\ndata_parser/v0.0.45\n", "--json=v0.0.44"),
        ("data_parser/v0.0.45\ndata_parser/v0.0.46\n", "--json"),
    ],
)
def test_form_of_the_queue_that_tells_of_exclusive(forms: str, form: str) -> None:
    assert json_records.queue_command(forms)[-1] == form


def test_licences_have_one_form() -> None:
    record = next(job for job in document("jobs", "26.05.5")["jobs"] if job["name"] == "bare")
    assert json_records.job(record | {"licenses": "matlab:1;muri_gate:1"}, 0.0).licenses == "matlab:1,muri_gate:1"


@pytest.mark.parametrize(("words", "usable"), [("IDLE+RESERVED", True), ("IDLE+MAINT", True), ("IDLE+DRAIN", False)])
def test_a_reservation_alone_closes_no_node(words: str, usable: bool) -> None:
    record = document("nodes", "26.05.5")["nodes"][0]
    assert json_records.node(record | {"state": words.split("+")}).usable is usable


def test_job_that_must_wait_until_later_says_so() -> None:
    record = next(job for job in document("jobs", "26.05.5")["jobs"] if job["name"] == "bare")
    record["eligible_time"]["number"] = 2_000
    assert json_records.job(record, taken_s=1_000.0).begin_s == 2_000
    assert json_records.job(record, taken_s=3_000.0).begin_s == 0
