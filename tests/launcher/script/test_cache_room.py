"""`muri.cache` without `gib`: the job's memory less what its processes need."""

import functools
import os
import subprocess
import sys

import pytest

import muri
from muri.clock import GIB, MIB
from muri.launcher.script.dataset_cache import left_bytes, memory_given

FILL = """\
import sys, muri
class Samples:
    def __len__(self): return 300
    def __getitem__(self, index): return bytes([index % 251]) * 2**20
held = bytearray(int(sys.argv[1]) * 2**20) if sys.argv[2] == "before" else None
data = muri.cache(Samples())
late = None
for index in range(300):
    assert data[index] == Samples()[index]
    if index == 20 and sys.argv[2] == "while": late = b"x" * (int(sys.argv[1]) * 2**20)
print(data.kept, data.gib)
need = sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
print(need * 1024 + data.used_gib * 2**30)
"""


@functools.cache
def fill(mem_mib, more_mib=0, when="never"):
    """How many MiB a process keeps that was given so much memory, and what all of it takes in bytes."""
    environment = os.environ | {"SLURM_MEM_PER_NODE": str(mem_mib), "SLURM_TASKS_PER_NODE": "1"}
    environment.pop("LOCAL_WORLD_SIZE", None)
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(more_mib), when], env=environment, capture_output=True, text=True, check=True
    )
    kept, _, total = done.stdout.split()
    return int(kept), float(total)


def test_it_takes_what_the_processes_leave_and_a_tenth_stays_free():
    kept, total = fill(256)
    assert 100 < kept < 0.9 * 256
    assert total <= 0.95 * 256 * MIB


@pytest.mark.parametrize("when", ["before", "while"])
def test_what_the_script_needs_itself_is_left_to_it(when):
    alone, _ = fill(256)
    beside, total = fill(256, 64, when)
    assert alone - 64 - 12 <= beside <= alone - 64 + 12  # the cache looks once in 8 MiB
    assert total <= 0.97 * 256 * MIB


def test_a_job_with_less_memory_than_its_processes_need_keeps_nothing():
    assert fill(4)[0] == 0


def test_without_a_word_from_slurm_nothing_is_kept_and_the_script_goes_on(monkeypatch, caplog):
    for name in ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU"):
        monkeypatch.delenv(name, raising=False)
    data = muri.cache(["a", "b"])
    assert [data[0], data[1], data[0]] == ["a", "b", "a"]
    assert (data.kept, data.gib) == (0, 0.0)
    assert "give gib=" in caplog.text


@pytest.mark.parametrize(
    ("environment", "given_gib"),
    [
        ({"SLURM_MEM_PER_NODE": "4096"}, 4),
        ({"SLURM_MEM_PER_NODE": "4096", "SLURM_TASKS_PER_NODE": "4(x2)"}, 1),
        ({"SLURM_MEM_PER_NODE": "4096", "SLURM_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "2"}, 2),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "3"}, 3),
        ({"SLURM_MEM_PER_GPU": "1024", "SLURM_GPUS_ON_NODE": "2"}, 2),
        ({"SLURM_MEM_PER_NODE": "0"}, 0),
        ({"SLURM_MEM_PER_CPU": "1024"}, 0),
        ({"SLURM_MEM_PER_NODE": "much"}, 0),
    ],
)
def test_what_slurm_says(environment, given_gib):
    assert memory_given(environment) == given_gib * GIB


def test_what_others_hold_counts():
    alone, beside = (left_bytes(64 * GIB, os.getpid(), others_bytes) for others_bytes in (0, GIB))
    assert beside == pytest.approx(alone - GIB, abs=64 * MIB)
