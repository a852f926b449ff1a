"""Workloads for `fidelity.py`: jobs of two users whose stages sleep for exact times, and the clusters that run them."""

import random
from dataclasses import dataclass, field, replace
from typing import Final

from muri_lab.twin.site import Delays

SANDBOX: Final = Delays(crowd_s=0.08, crowd_alone_s=0.053, join_s=0.17)
"""How long things take on a sandbox on two cores, which all of its nodes share."""

STAGES: Final = ("load", "preprocess", "propagate", "synchronize")
USERS: Final = ("alice", "bob")
FIRST_SUBMIT_S: Final = 4.0


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """One job."""

    submit_s: float  # When it is submitted, in seconds from the start
    user: str
    model: str  # One of the workload's models
    node_count: int  # Nodes
    gpus_per_node: int  # GPUs on each
    iterations: int  # Iterations that it trains for

    @property
    def gpu_count(self) -> int:
        """GPUs of the whole job."""
        return self.node_count * self.gpus_per_node


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs, a cluster, and the controller's configuration."""

    name: str  # Its name
    node_count: int  # Nodes
    gpus_per_node: int  # GPUs on each
    models: dict[str, tuple[float, float, float, float]]  # Seconds of the four stages of an iteration, by model
    jobs: tuple[WorkloadJob, ...]  # By submission
    config: dict[str, object] = field(default_factory=dict)  # What differs from the defaults of muri.yaml
    is_cold: bool = False  # Whether nothing is known when it begins: no model has a profile
    tells_durations: bool = True  # Whether users say how long their jobs take


def seeded(text: str) -> random.Random:
    """Return a generator that draws the same for the same text."""
    return random.Random(text)


def workload(
    name: str, seed: int, shape: tuple[int, int], job_count: int, *, load: float = 1.6, mean_s: float = 16.0,
    wide: float = 0.0, **config: object,
) -> Workload:  # fmt: skip
    """Make a workload."""
    draw = seeded(f"fidelity {name} {seed}")
    node_count, gpus_per_node = shape
    models = {f"{name}-m{number}": _stages(draw, number) for number in range(6)}
    gpu_s_per_s = load * node_count * gpus_per_node
    now_s, jobs = FIRST_SUBMIT_S, []
    for _ in range(job_count):
        model = draw.choice(sorted(models))
        duration_s = mean_s * 2 ** draw.uniform(-1, 1)
        gpus = (1, 2) if draw.random() < wide and gpus_per_node > 1 else (1, 1)
        jobs.append(WorkloadJob(round(now_s, 2), draw.choice(USERS), model, *gpus,
                                max(1, round(duration_s / sum(models[model])))))  # fmt: skip
        now_s += draw.expovariate(gpu_s_per_s / (mean_s * 1.08 * (1 + wide)))
    return Workload(name, node_count, gpus_per_node, models, tuple(jobs), dict(config))


def _stages(draw: random.Random, number: int) -> tuple[float, float, float, float]:
    """One stage takes most of an iteration of 0.1 to 0.4 s, a different one for each model in turn."""
    iteration_s, most = draw.uniform(0.1, 0.4), draw.uniform(0.5, 0.8)
    rest = [draw.uniform(0.3, 1) for _ in range(3)]
    shares = [(1 - most) * each / sum(rest) for each in rest]
    shares.insert(number % 4, most)
    times = [round(iteration_s * share, 3) for share in shares]
    return times[0], times[1], times[2], times[3]


_FAIR: Final = {"discipline": "fair"}

WORKLOADS: Final = (
    workload("one-node", 1, (1, 2), 24, load=1.8, policy="muri-jct", grouping=_FAIR),
    workload("one-node-long", 2, (1, 2), 24, load=1.5, mean_s=20, policy="muri-l", grouping=_FAIR),
    workload("two-nodes", 3, (2, 2), 40, load=1.8, policy="muri-jct", grouping=_FAIR),
    workload("two-nodes-wide", 4, (2, 2), 32, load=1.6, wide=0.3, policy="muri-s", grouping=_FAIR),
    workload("three-nodes", 5, (3, 1), 30, load=1.7, policy="muri-hybrid", grouping=_FAIR),
    workload("four-nodes", 6, (4, 2), 60, load=1.7, mean_s=18, policy="muri-jct", grouping=_FAIR),
    workload("four-nodes-wide", 7, (4, 2), 48, load=1.6, mean_s=18, wide=0.3, policy="muri-jct", grouping=_FAIR),
    workload("calm", 8, (2, 2), 30, load=0.8, policy="muri-jct", grouping=_FAIR),
    workload("crowded", 9, (1, 2), 30, load=3.0, mean_s=12, policy="muri-jct", grouping=_FAIR),
    workload("no-joins", 10, (2, 1), 24, load=1.6, policy="muri-s", grouping={**_FAIR, "join": False}),
    workload("slurm-order", 11, (2, 2), 36, load=1.6, policy="muri-slurm", grouping=_FAIR),
    workload("turns-or-not", 12, (2, 1), 24, load=1.8, mean_s=20, policy="muri-jct"),
)

VALIDATION: Final = (
    workload("fresh-one", 101, (1, 2), 26, load=1.7, policy="muri-jct", grouping=_FAIR),
    workload("fresh-two", 102, (2, 2), 40, load=1.7, wide=0.15, policy="muri-s", grouping=_FAIR),
    workload("fresh-three", 103, (3, 2), 48, load=1.6, mean_s=18, policy="muri-jct", grouping=_FAIR),
    workload("fresh-four", 104, (4, 1), 36, load=1.7, policy="muri-l", grouping=_FAIR),
    workload("unseen-one", 201, (2, 2), 36, load=1.7, policy="muri-jct", grouping=_FAIR),
    workload("unseen-two", 202, (1, 2), 28, load=1.6, mean_s=18, policy="muri-s", grouping=_FAIR),
    workload("unseen-three", 203, (4, 1), 32, load=1.6, policy="muri-jct", grouping=_FAIR),
    workload("unseen-four", 204, (3, 2), 44, load=1.6, mean_s=18, wide=0.2, policy="muri-l", grouping=_FAIR),
)
"""Made to see what the twin predicts of others: the `fresh` ones have been looked at since, the `unseen` have not."""

FORTY: Final = replace(
    workload("forty", 18, (2, 2), 40, load=1.8, mean_s=20, policy="muri-jct", grouping=_FAIR,
             profiling={"mode": "in-place"}),
    is_cold=True, tells_durations=False,
)  # fmt: skip
"""For `forty.py`: nothing is known when it begins, and users do not say how long their jobs take."""

_DRAWN: Final = "drawn-"
_POLICIES: Final = ("muri-s", "muri-l", "muri-jct", "muri-hybrid", "muri-slurm")


def drawn(seed: int) -> Workload:
    """Make the workload `drawn-SEED`, of which everything is drawn: cluster, jobs, load, policy, discipline."""
    name = f"{_DRAWN}{seed}"
    draw = seeded(f"fidelity {name}")
    shape = draw.choice(((1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)))
    gpus = shape[0] * shape[1]
    return workload(
        name, seed, shape, min(60, max(24, round(draw.uniform(8, 14) * gpus))),
        load=round(draw.uniform(0.8, 2.0), 2), mean_s=round(draw.uniform(14, 20), 1),
        wide=round(draw.choice((0, 0, 0.15, 0.3)), 2) if shape[1] > 1 else 0.0,
        policy=draw.choice(_POLICIES), grouping={"discipline": draw.choice(("fair", "fair", "fair", "auto"))},
    )  # fmt: skip


def named(name: str) -> Workload | None:
    """Return a workload by its name, None where there is none of that name."""
    seed = name.removeprefix(_DRAWN)
    if seed != name and seed.isdecimal():
        return drawn(int(seed))
    return next((each for each in (*WORKLOADS, *VALIDATION, FORTY) if each.name == name), None)
