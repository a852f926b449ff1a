"""The demo and the cold start, whose figures the pages state, small and on real clusters of their own."""

import json
import subprocess
import sys

import pytest

from sandbox.support import CHECKOUT

pytestmark = pytest.mark.thorough


def printed(*command: str) -> str:
    """What one of the benchmarks prints; figures of so short jobs may miss their bars."""
    done = subprocess.run([sys.executable, *command], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(1800)
def test_the_demo_runs_its_three_rounds_and_says_what_they_took() -> None:
    says = printed("-m", "benchmarks.demo", "--runs", "1", "--iterations", "20").splitlines()[-1]
    assert says.startswith("In one run (short jobs of 20 iterations, ")
    assert says.endswith(" times shorter.")


def test_a_cold_start_is_measured_beside_plain_slurm() -> None:
    found = json.loads(printed("benchmarks/cold.py", "--rounds", "1", "--jobs", "2", "--no-write", "--json"))
    rounds = found["cases"]["cold"]["rounds"]
    assert {side: [len(each["jobs"]) for each in rounds[side]] for side in ("plain", "muri")} == {
        "plain": [2],
        "muri": [2],
    }
