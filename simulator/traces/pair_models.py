"""What made-up jobs train, from a table of pair speeds: what a model is like alone, and how its batch can be split.

A table says how many iterations per second a configuration trains alone, and names it "ResNet-18 (batch size 64)".
It says nothing of stages and of memory. So all of an iteration is taken for GPU time; α and β of the batch model are
fitted over the batch sizes that a table has of one model; and memory is an assumption, stated below.
"""

import csv
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from muri.policies.speed.measured import COLUMNS
from muri.policies.traits import BatchModel
from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.traces.problems import TraceError

FIXED_MEM_GIB: Final = 1.5
LARGEST_MEM_GIB: Final = 11.0
"""Assumed, of a GPU with 16 GiB: what a model takes without any sample, and with the largest batch of the table."""

OTHER_MEM_GIB: Final = 4.0
"""Assumed for a model of a single configuration, whose batch is never split."""

MOST_STEPS: Final = 8
"""Accumulation steps into which a batch can be split."""

_NAME: Final = re.compile(r"(?P<family>.+) \(batch size (?P<batch_size>\d+)\)")


class TrainedModel(NamedTuple):
    """What a job trains.

    Attributes:
        name: As the table has it.
        iteration_s: Seconds of an iteration alone.
        batch: How its batch can be split; None: it can't.
        gpu_mem_gib: Memory that it takes on each GPU.
    """

    name: str
    iteration_s: float
    batch: BatchModel | None
    gpu_mem_gib: float

    def profile(self, gpu_count: int) -> StageProfile:
        """Its profile, which is the same on any number of GPUs."""
        batch_size = 0 if self.batch is None else self.batch.batch_size
        return StageProfile(
            ProfileKey(self.name, batch_size, gpu_count, "gpu"),
            load_s=0.0,
            preprocess_s=0.0,
            propagate_s=self.iteration_s,
            synchronize_s=0.0,
            iteration_s=self.iteration_s,
            gpu_mem_gib=self.gpu_mem_gib,
            source="import",
        )

    def batch_on(self, gpu_count: int) -> BatchModel | None:
        """How its batch can be split, the same on any number of GPUs."""
        return self.batch


def models_of_pairs(lines: Iterable[str]) -> tuple[TrainedModel, ...]:
    """The models of a table of pair speeds, by name.

    Args:
        lines: The table's lines, the header first, as `muri.policies.speed.measured.parse_interference` takes them.

    Raises:
        TraceError: A column is missing, or a speed alone is no number above 0.
    """
    alone = _alone_s(lines)
    found: list[TrainedModel] = []
    for family, names in groupby(sorted(alone, key=lambda name: (_family(name), name)), key=_family):
        members = list(names)
        sizes = {name: int(match["batch_size"]) for name in members if (match := _NAME.fullmatch(name))}
        if len(sizes) < 2:
            found += [TrainedModel(name, alone[name], None, OTHER_MEM_GIB) for name in members]
            continue
        fixed_s, per_sample_s = _fit([(size, alone[name]) for name, size in sizes.items()], family)
        per_sample_gib = (LARGEST_MEM_GIB - FIXED_MEM_GIB) / max(sizes.values())
        for name, size in sizes.items():
            batch = BatchModel(
                size,
                fixed_s,
                per_sample_s,
                fixed_mem_gib=FIXED_MEM_GIB,
                mem_gib_per_sample=per_sample_gib,
                max_accumulate_steps=MOST_STEPS,
            )
            found.append(TrainedModel(name, alone[name], batch, batch.mem_gib()))
    return tuple(sorted(found, key=lambda model: model.name))


def _alone_s(lines: Iterable[str]) -> dict[str, float]:
    """Seconds of an iteration alone by model."""
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise TraceError(f"the table of pairs has no column {missing[0]}; it needs {', '.join(COLUMNS)}")
    alone: dict[str, float] = {}
    for row in reader:
        for name, rate in ((row["job_a"], row["solo_a_iters_per_s"]), (row["job_b"], row["solo_b_iters_per_s"])):
            try:
                alone[name] = 1 / float(rate)
            except (ValueError, TypeError, ZeroDivisionError) as err:
                raise TraceError(
                    f"the table of pairs, line {reader.line_num}: {name} alone makes {rate!r} iterations per second; "
                    "it must be a number above 0"
                ) from err
    return alone


def _family(name: str) -> str:
    match = _NAME.fullmatch(name)
    return match["family"] if match else name


def _fit(points: list[tuple[int, float]], family: str) -> tuple[float, float]:
    """α ≥ 0 and β of t = α + βB, by least squares of the relative errors."""
    sizes, times = np.array([point[0] for point in points], float), np.array([point[1] for point in points])
    matrix = np.stack([1 / times, sizes / times], axis=1)
    fixed_s, per_sample_s = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0].tolist()
    if fixed_s < 0:
        fixed_s, per_sample_s = 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
    if per_sample_s < 0:
        raise TraceError(
            f"the table of pairs: {family} trains larger batches in less time, which no batch model allows"
        )
    return fixed_s, per_sample_s
