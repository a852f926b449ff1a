"""How long grouping takes and how far from the optimum it can be, beside other solvers.

    python -m muri_lab.benchmarks.grouping --jobs 1000 --profiles 1000 --peers --json          pairs, all distinct
    python -m muri_lab.benchmarks.grouping --jobs 1000 --profiles 64 --group-size 4 --json     groups of four
    python -m muri_lab.benchmarks.grouping --jobs 100000 --profiles 64 --group-size 4 --buckets 6 --gpus 20000 --json
                                                                                     a whole plan

Times are of one run, in seconds. `efficiency` is the sum of γ (Muri, Eq. 4) over the groups, `upper_bound` what no
grouping can exceed, `gap` the share that may be missing.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from muri.policies.cycle.planner import plan_queue
from muri.policies.grouping.engine import group_buckets
from muri.policies.grouping.problem import BucketProblem, kinds_with
from muri.policies.options import PolicyOptions
from muri.policies.priority import two_dimensional_las
from muri.policies.speed.model import Shape
from muri.policies.speed.registry import speed_model
from muri.policies.types import Certificate, FreeNode, PlanJob, PlanRequest
from muri.profiler.records import ProfileKey, StageProfile
from muri_lab.benchmarks import grouping_pairs
from muri_lab.benchmarks.machine import describe_machine, peak_rss_mib

GPU_COUNTS = (1, 2, 4, 8, 16, 32)
GPUS_PER_NODE = 8


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of some work."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def figures(seconds: float, certificate: Certificate) -> dict[str, float]:
    """The fields that every solver reports."""
    return {
        "solver_s": round(seconds, 4),
        "efficiency": certificate.value,
        "upper_bound": certificate.upper_bound,
        "gap": certificate.gap,
    }


def job_shapes(jobs: int, profiles: int, seed: int) -> list[Shape]:
    """A queue that trains so many distinct models, every one at least once."""
    kinds = grouping_pairs.random_shapes(profiles, seed)
    extra = np.random.default_rng(seed).integers(0, profiles, jobs - profiles)
    return kinds + [kinds[index] for index in extra.tolist()]


def pairs(jobs: int, profiles: int, seed: int, *, with_peers: bool) -> dict[str, Any]:
    """The best pairs: one round of Algorithm 1."""
    if profiles < jobs:
        return grouped(jobs, profiles, 2, seed, with_peers=with_peers)
    shapes = job_shapes(jobs, profiles, seed)
    weighing_s, weights = timed(lambda: grouping_pairs.pair_weights(shapes))
    result = {**grouping_pairs.solve_pairs(weights), "weights_s": round(weighing_s, 4)}
    if with_peers:
        result["peers"] = grouping_pairs.peers(weights)
    return result


def grouped(jobs: int, profiles: int, size: int, seed: int, *, with_peers: bool) -> dict[str, Any]:
    """Groups of up to `size`, as many as it takes to run every job at once."""
    shapes = job_shapes(jobs, profiles, seed)
    problem = BucketProblem(kinds_with(shapes), 1, -(-jobs // size))
    model = speed_model("lockstep")

    def solve(**options: Any) -> dict[str, float]:
        how = PolicyOptions(max_group_size=size, **options)
        seconds, (answer,) = timed(lambda: group_buckets([problem], how, model))
        return figures(seconds, answer.certificate)

    result: dict[str, Any] = solve(grouping="optimal")
    if with_peers:
        bound = result["upper_bound"]
        methods = ["certified", "rustworkx"] + (["networkx"] if jobs <= grouping_pairs.NETWORKX_LIMIT else [])
        result["peers"] = {}
        for method in methods:
            found = solve(grouping="rounds", matching=method)
            name = "algorithm-1" if method == "certified" else method
            result["peers"][name] = {
                "solver_s": found["solver_s"],
                "efficiency": found["efficiency"],
                "below_bound": 1.0 - found["efficiency"] / bound,
            }
    return result


def whole_plan(jobs: int, profiles: int, size: int, buckets: int, gpus: int, seed: int) -> dict[str, Any]:
    """Priorities, selection, grouping, placement and reasons of one cycle, with 2D-LAS as the order."""
    rng = np.random.default_rng(seed)
    known = [
        StageProfile(ProfileKey(shape.model, 32, 1, "gpu"), *shape.stage_s, iteration_s=shape.iteration_s)
        for shape in grouping_pairs.random_shapes(profiles, seed)
    ]
    kind = rng.integers(0, profiles, jobs).tolist()
    count = rng.choice(GPU_COUNTS[:buckets], jobs).tolist()
    attained = rng.exponential(36_000.0, jobs).tolist()
    queue = tuple(
        PlanJob(job_id, "alice", "main", count[job_id], float(job_id), known[kind[job_id]], None, attained[job_id])
        for job_id in range(jobs)
    )
    nodes = tuple(
        FreeNode(f"n{index:05}", ("main",), GPUS_PER_NODE, gpu_count=GPUS_PER_NODE)
        for index in range(gpus // GPUS_PER_NODE)
    )
    request = PlanRequest(queue, nodes, float(jobs), max_group_size=size, larger_than_a_node="whole-nodes")
    options = PolicyOptions(max_group_size=size, grouping="optimal", max_wait_s=float("inf"))
    seconds, plan = timed(lambda: plan_queue(request, "benchmark", two_dimensional_las, options))
    started = sum(len(group.members) for group in plan.groups) + len(plan.solo)
    return {
        **figures(seconds, plan.certificate),
        "jobs_started": started,
        "groups": len(plan.groups),
        "gpus_used": sum(group.gpu_count for group in plan.groups)
        + sum(s.gpu_count for u in plan.solo for s in u.gpus),
    }


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, required=True, metavar="N")
    parser.add_argument("--profiles", type=int, metavar="K", help="distinct profiles; default: as many as jobs")
    parser.add_argument("--group-size", type=int, default=2, choices=(2, 3, 4), help="most jobs per group; default 2")
    parser.add_argument("--buckets", type=int, default=1, choices=range(1, len(GPU_COUNTS) + 1), help="GPU counts")
    parser.add_argument("--gpus", type=int, help="make a whole plan for so many GPUs instead of only groups")
    parser.add_argument("--peers", action="store_true", help="also time networkx (up to 400 jobs) and rustworkx")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.profiles = given.jobs if given.profiles is None else given.profiles
    if not 1 <= given.profiles <= given.jobs:
        parser.error(f"--profiles is {given.profiles}; it must be 1 to --jobs ({given.jobs})")
    if given.buckets > 1 and given.gpus is None:
        parser.error("--buckets is for a whole plan; add --gpus N")
    return given


def main() -> int:
    """Run one case and print its figures."""
    given = arguments()
    if given.gpus is not None:
        found = whole_plan(given.jobs, given.profiles, given.group_size, given.buckets, given.gpus, given.seed)
    elif given.group_size == 2:
        found = pairs(given.jobs, given.profiles, given.seed, with_peers=given.peers)
    else:
        found = grouped(given.jobs, given.profiles, given.group_size, given.seed, with_peers=given.peers)
    case = {name: getattr(given, name) for name in ("jobs", "profiles", "group_size", "buckets", "gpus", "seed")}
    result = {**case, **found, "peak_rss_mib": peak_rss_mib(), "machine": describe_machine()}
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:14} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
