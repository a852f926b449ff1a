"""Snapshot files and slurmctld's state files."""

import json
import random
import struct
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from fake_slurm import make_job
from hypothesis import given
from hypothesis import strategies as st
from recorded_slurm import jobs, recorded

from muri.slurm_plugin.gateway import base as state_files
from muri.slurm_plugin.gateway.tables import nodes_of_table
from muri.slurm_plugin.records.cluster import Snapshot, SnapshotFileError, dump_snapshot, load_snapshot, parse_snapshot


@cache
def snapshot() -> Snapshot:
    nodes = nodes_of_table(recorded("26.05.5")["nodes"])
    return Snapshot(1e9 + 0.25, "invented", "26.05.5", tuple(jobs("26.05.5").values()), nodes)


def test_snapshot_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(dump_snapshot(snapshot()), encoding="utf-8")
    read = load_snapshot(path)
    assert sorted(read.jobs, key=lambda job: job.job_id) == sorted(snapshot().jobs, key=lambda job: job.job_id)
    assert (read.nodes, read.taken_s, read.cluster) == (snapshot().nodes, snapshot().taken_s, "invented")
    assert dump_snapshot(read) == dump_snapshot(snapshot())


def test_a_snapshot_file_from_before_memory_was_told_is_read() -> None:
    document = json.loads(dump_snapshot(snapshot()))
    for record in (*document["jobs"], *document["nodes"]):
        for name in ("mem_per_cpu_mib", "mem_mib", "mem_allocated_mib", "threads_per_core"):
            record.pop(name, None)
    old = parse_snapshot(json.dumps(document))
    assert (old.jobs[0].mem_per_cpu_mib, old.nodes[0].mem_mib, old.nodes[0].mem_allocated_mib) == (0, 0, 0)


@given(st.randoms(use_true_random=False))
def test_order_of_reading_does_not_show(order: random.Random) -> None:
    jobs, nodes = list(snapshot().jobs), list(snapshot().nodes)
    order.shuffle(jobs)
    order.shuffle(nodes)
    assert dump_snapshot(replace(snapshot(), jobs=tuple(jobs), nodes=tuple(nodes))) == dump_snapshot(snapshot())


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"state": "RUNNING"', '"state": "WALKING"', r"jobs\[1\]: state.*WALKING.*known are PENDING"),
        ('"gpu_count": 2', '"gpu_count": true', r"jobs\[1\]: gpu_count: int is expected, not true"),
        ('"gpu_count": 2', '"gpus": 2', r"jobs\[1\]: gpu_count missing"),
        ('"usable": true', '"usable": true, "color": 1', r"nodes\[0\]: unknown color; known are name"),
        ('"schema_version": 1', '"schema_version": 99', "schema_version is 99, this Muri reads 1"),
        ('"job_id": 2,', '"job_id": 1,', r"jobs\[1\]: job_id 1 appears twice"),
        ('"cluster"', "cluster", "line 5"),
    ],
)
def test_damage_is_named_with_its_place(old: str, new: str, said: str) -> None:
    text = dump_snapshot(snapshot())
    assert old in text
    with pytest.raises(SnapshotFileError, match=f"s.json.*{said}"):
        parse_snapshot(text.replace(old, new, 1), "s.json")


TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.dictionaries(TEXTS.filter(lambda name: name and "=" not in name), TEXTS))
def test_environment_file(environment: dict[str, str]) -> None:
    content = struct.pack("=I", len(environment))
    content += b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    assert state_files.parse_environment(content) == environment


@pytest.mark.parametrize("content", [b"", b"\1\0\0", struct.pack("=I", 2) + b"A=1\0", struct.pack("=I", 1) + b"A=1"])
def test_environment_file_of_another_form_is_not_believed(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"header|announces"):
        state_files.parse_environment(content)
    path = tmp_path / "hash.7" / "job.27" / "environment"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert state_files.job_environment(str(tmp_path), 27) is None
    assert state_files.job_environment(str(tmp_path), 28) is None
    path.write_bytes(struct.pack("=I", 1) + b"A=1\0")
    assert state_files.job_environment(str(tmp_path), 27) == {"A": "1"}


def test_texts_of_any_bytes_survive_a_snapshot_file_and_harm_no_terminal(tmp_path):
    snapshot = Snapshot(1.0, "c", "26.05", (make_job(1, name="caf\udce9", comment="naïve \x9b2J"),), ())
    path = tmp_path / "s.json"
    path.write_text(dump_snapshot(snapshot), encoding="utf-8")
    assert load_snapshot(path) == snapshot
    assert path.read_text(encoding="utf-8").isascii()
