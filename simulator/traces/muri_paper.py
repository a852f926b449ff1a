"""The Muri paper's trace files: milliseconds, storage and CPU time as one figure (facts in docs/traces.md)."""

from collections.abc import Iterator

from muri.profiler.records import ProfileKey, StageProfile
from muri.simulator.model import TraceJob
from muri.simulator.traces.formats import Format, Reading, header_of
from muri.simulator.traces.problems import RowError
from muri.simulator.traces.tables import Row, read_rows

COLUMNS = (
    "job_id",
    "num_gpu",
    "submit_time",
    "iterations",
    "model_name",
    "batch_size",
    "iteration_time",
    "resource_time_0",
    "resource_time_1",
    "resource_time_2",
)
"""Columns that must be there; `duration`, `interval` and `priority` may be."""

LOAD_SHARES = {
    "shufflenet": 60 / 78,
    "vgg": 24 / 28,
    "gpt2": 0.06 / 0.09,
    "a2c": 0.0,
    "resnet": 60 / 78,
    "bert": 0.06 / 0.09,
    "dqn": 0.0,
}
"""Share of load in load + preprocess by the beginning of the model's name: Muri (SIGCOMM 2022), Table 1, for
ShuffleNet, VGG19, GPT-2 and A2C; the others take that of the nearest kind: ResNet reads the same images as
ShuffleNet, BERT text as GPT-2 does, and DQN learns from a simulator's frames like A2C."""

OTHER_LOAD_SHARE = 0.5
_MS = 1000.0


def load_share(model: str) -> float:
    """Share of load in a model's load + preprocess time."""
    name = model.lower().replace("-", "").replace("_", "")
    return next((share for kind, share in LOAD_SHARES.items() if name.startswith(kind)), OTHER_LOAD_SHARE)


def split_exactly(total: float, share: float) -> tuple[float, float]:
    """Two parts of about share : 1 − share whose sum in floating point is the total, to the last bit.

    The larger part is at least half of the total, so subtracting it from the total is exact (Sterbenz' lemma).
    """
    larger = total - total * min(share, 1 - share)
    smaller = total - larger
    return (larger, smaller) if share > 1 - share else (smaller, larger)


def _profile(row: Row, gpu_count: int) -> StageProfile:
    model = row.text("model_name")
    if not model:
        raise RowError("model_name", "is empty")
    load_s, preprocess_s = split_exactly(row.number("resource_time_0") / _MS, load_share(model))
    return StageProfile(
        key=ProfileKey(model, row.count("batch_size"), gpu_count, "gpu"),
        load_s=load_s,
        preprocess_s=preprocess_s,
        propagate_s=row.number("resource_time_1") / _MS,
        synchronize_s=row.number("resource_time_2") / _MS,
        iteration_s=row.number("iteration_time", more_than=0) / _MS,
        source="import",
    )


def _job(row: Row) -> TraceJob:
    gpu_count = row.count("num_gpu", at_least=1)
    duration_ms = row.optional_number("duration")
    return TraceJob(
        job_id=row.count("job_id"),
        submit_s=row.number("submit_time") / _MS,
        gpu_count=gpu_count,
        iterations=row.count("iterations", at_least=1),
        profile=_profile(row, gpu_count),
        opportunistic=row.flag("priority"),
        listed_duration_s=None if duration_ms is None else duration_ms / _MS,
    )


def _read(reading: Reading) -> Iterator[tuple[int, TraceJob]]:
    for row in read_rows(reading.source.name, reading.source.lines(), None, COLUMNS):
        if not isinstance(row, Row):
            reading.bad(*row)
            continue
        try:
            yield row.line, _job(row)
        except RowError as error:
            reading.bad(row.line, error)


FORMAT = Format(
    name="muri-paper",
    summary="the Muri paper's trace files (CSV, milliseconds)",
    looks_like=lambda head: {"num_gpu", "resource_time_0", "iteration_time"} <= header_of(head),
    read=_read,
)
