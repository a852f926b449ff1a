"""Small runs of the two commands that measure the demo and a cold start, each on its own real cluster."""

import json
import subprocess
import sys

import pytest

from sandbox.support import CHECKOUT

pytestmark = pytest.mark.thorough


def printed(*command: str, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([sys.executable, *command], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1800)
def test_the_demo_runs_its_three_rounds_and_says_what_they_took() -> None:
    says = printed("-m", "muri_lab.benchmarks.demo", "--runs", "1", "--iterations", "20").splitlines()[-1]
    assert says.startswith("In one run (short jobs of 20 iterations, ")
    assert says.endswith(" times shorter.")


def test_a_cold_start_is_measured_beside_plain_slurm() -> None:
    command = ("-m", "muri_lab.benchmarks.cold", "--rounds", "1", "--jobs", "2", "--no-write", "--json")
    found = json.loads(printed(*command, codes=(0, 1)))  # 1: two jobs do not gain what eleven do
    counts = {side: [len(each["jobs"]) for each in runs] for side, runs in found["cases"]["cold"]["rounds"].items()}
    assert counts == {"plain": [2], "muri": [2]}
