"""Pairs of jobs to hold estimates against: random ones, simulated, and those that Gavel measured on a V100."""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from muri.profiler.records import ProfileKey, StageProfile

GAVEL = Path(__file__).resolve().parents[4] / "shared" / "reference" / "gavel_pairs_v100.csv"
SEED = 1
ROUNDS = 400

Floats = NDArray[np.float64]


def random_profiles(count: int) -> list[StageProfile]:
    """Jobs with one to four stages of random lengths; iterations of 20 ms to 1 s."""
    generator = np.random.default_rng(SEED)
    profiles = []
    for index in range(count):
        stages = generator.dirichlet(np.full(4, 0.6)) * np.exp(generator.uniform(np.log(0.02), 0.0))
        key = ProfileKey(f"job{index}", 0, 1, "gpu")
        profiles.append(StageProfile(key, *(float(value) for value in stages), iteration_s=float(stages.sum())))
    return profiles


def simulate(a: StageProfile, b: StageProfile) -> tuple[float, float]:
    """ξ of two jobs that share each resource in halves while both want it."""
    jobs = [[(stage, length) for stage, length in enumerate(job.stage_s) if length > 1e-9] for job in (a, b)]
    place, done, left = [0, 0], [0, 0], [jobs[0][0][1], jobs[1][0][1]]
    now_s, ends_s = 0.0, [0.0, 0.0]
    while min(done) < ROUNDS:
        both = jobs[0][place[0]][0] == jobs[1][place[1]][0]
        step_s = min(left) * (2 if both else 1)
        now_s += step_s
        for index in (0, 1):
            left[index] -= step_s / 2 if both else step_s
            if left[index] <= 1e-12:
                place[index] = (place[index] + 1) % len(jobs[index])
                if place[index] == 0:
                    done[index], ends_s[index] = done[index] + 1, now_s
                left[index] = jobs[index][place[index]][1]
    first, second = (ends_s[i] / done[i] / job.iteration_s for i, job in enumerate((a, b)))
    return first, second


def gavel_pairs(lines: Iterable[str]) -> tuple[NDArray[np.int64], Floats]:
    """Model indices (n, 2) and ratios (n, 2)."""
    rows = list(csv.DictReader(lines))
    names = sorted({row[name] for row in rows for name in ("job_a", "job_b")})
    models = np.array([[names.index(row["job_a"]), names.index(row["job_b"])] for row in rows])
    ratios = np.array([[1 / float(row["speed_a_fraction"]), 1 / float(row["speed_b_fraction"])] for row in rows])
    return models, ratios
