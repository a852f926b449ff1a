"""Slurm's small notations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.gateway import tables, text_fields
from muri.slurm_plugin.records.cluster import JobState

NAMES = st.from_regex(r"gpu(:[a-z][a-z0-9_]{0,8})?|shard|nvme", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("", {}),
        ("gres/gpu:2", {"gpu": 2}),
        ("gres/gpu", {"gpu": 1}),
        ("gres/gpu:a100", {"gpu:a100": 1}),
        ("cpu=3,gres/gpu:a100=1", {"gpu:a100": 1}),
        ("gpu:a100:1(IDX:0),gpu:v100:2(IDX:1-2)", {"gpu:a100": 1, "gpu:v100": 2}),
        ("gpu:2,shard:1K", {"gpu": 2, "shard": 1024}),
        ("(null)", {}),
        ("gres/gpu:0", {"gpu": 0}),
    ],
)
def test_gres_in_every_notation(text: str, counts: dict[str, int]) -> None:
    assert text_fields.gres_counts(text) == counts


@given(st.dictionaries(NAMES, st.integers(0, 10_000), max_size=4))
def test_request_is_read_as_it_was_written(counts: dict[str, int]) -> None:
    text = text_fields.request_text(counts)
    assert text_fields.gres_counts(text) == counts
    assert text_fields.gres_counts(text.replace("gres/", "gres:")) == counts


@pytest.mark.parametrize(
    ("counts", "total", "kind"),
    [
        ({}, 0, "gpu"),
        ({"gpu": 2}, 2, "gpu"),
        ({"gpu:v100": 1, "gpu:a100": 2, "shard": 9}, 3, "a100"),
        ({"gpu": 3, "gpu:a100": 2}, 3, "a100"),
    ],
)
def test_gpus_among_gres(counts: dict[str, int], total: int, kind: str) -> None:
    assert text_fields.gpu_total(counts) == total
    assert text_fields.gpu_type(counts) == kind


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["RUNNING"], JobState.RUNNING),
        (["COMPLETED", "COMPLETING"], JobState.COMPLETING),
        (["RUNNING", "CONFIGURING"], JobState.RUNNING),
        (["PENDING", "REQUEUE_HOLD"], JobState.PENDING),
        (["EXPEDITING"], JobState.PENDING),
        (["REQUEUED"], JobState.PENDING),
        (["SPECIAL_EXIT"], JobState.PENDING),
        (["OUT_OF_MEMORY"], JobState.OUT_OF_MEMORY),
        (["SOMETHING_NEW"], JobState.UNKNOWN),
        ([], JobState.UNKNOWN),
    ],
)
def test_job_states(words: list[str], state: JobState) -> None:
    assert text_fields.job_state(words) is state


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("ALLOCATED", True),
        ("IDLE+PLANNED", True),
        ("IDLE~", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("MIXED+DRAIN", False),
        ("IDLE*", False),
        ("IDLE+NOT_RESPONDING", False),
        ("IDLE$", True),
        ("IDLE+RESERVED", True),
        ("ALLOCATED+MAINTENANCE", True),
        ("IDLE@", False),
        ("SOMETHING_NEW", False),
        ("", False),
    ],
)
def test_where_new_jobs_can_start(text: str, usable: bool) -> None:
    assert tables.node_usable(tables.node_words(text)) is usable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("afterok:3(unfulfilled)", "afterok:3"),
        ("afterok:7:5(unfulfilled),after:2+5(failed)", "after:2+5,afterok:5,afterok:7"),
        ("afterok:2(unfulfilled)?afterany:1(unfulfilled)", "afterany:1?afterok:2"),
        ("singleton(unfulfilled)", "singleton"),
    ],
)
def test_dependencies_have_one_form(text: str, expected: str) -> None:
    assert text_fields.dependency_text(text) == expected
    assert text_fields.dependency_text(expected) == expected


@pytest.mark.parametrize("text", ["job requeued in held state", "job_requeued_in_held_state"])
def test_a_reason_reads_the_same_from_every_interface(text: str) -> None:
    assert text_fields.reason_text(text) == "job_requeued_in_held_state"


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("0-9,12%3", "0-9,12"), ("5", "5"), ("0-8:2,9", "0-8:2,9"), ("1,3,4...%2", "1,3"), ("", ""), ("x,7,0-:", "7")],
)
def test_waiting_tasks_of_an_array(text: str, tasks: str) -> None:
    assert text_fields.waiting_tasks(text) == tasks


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("gpu:2(IDX:0-1),muri:0", (0, 1)),
        ("gpu:a100:1(IDX:0),gpu:v100:2(IDX:2,5)", (0, 2, 5)),
        ("gpu:tesla:0(IDX:N/A),muri:3", ()),
        (f"gpu:2(IDX:1,{'9' * 5000},2-{'9' * 5000})", (1,)),
        ("gpu:2(IDX:3,12345,67890-67899)", (3,)),
        ("gpu:2", ()),
        ("", ()),
    ],
)
def test_indices_in_use(text, indices):
    assert tables.indices_in(text) == indices
