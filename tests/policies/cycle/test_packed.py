"""GPUs one by one: who is on them, what is free, and requests that don't say so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_builders import make_cluster_node, make_job, make_node, make_request

from muri.policies.cycle.validation import RequestError, check_request
from muri.policies.siblings.packed import PackedGpus, mem_gib_of, shares_of
from muri.policies.traits import BatchModel
from muri.policies.types import NodeShare, Running

BATCH = BatchModel(16, 0.1, 0.01, fixed_mem_gib=2.0, mem_gib_per_sample=0.5, max_accumulate_steps=8)


def runs(job, *gpu_ids, node="n1", **changes):
    return Running((job,), (NodeShare(node, len(gpu_ids), gpu_ids),), **changes)


def busy_node(*free, **changes):
    """Four GPUs, of which these are free."""
    fields = {"gpu_count": 4, "topology": ((0, 1), (2, 3)), "islands": (free,) if free else ()}
    return make_node("n1", len(free), **(fields | changes))


def test_who_is_where():
    first, second = make_job(1, gpu_count=2), make_job(2, batch=BATCH)
    request = make_request(
        [], [busy_node(2, 3, gpu_mem_gib=16.0)], running=(runs(first, 0, 1), runs(second, 1, accumulate_steps=4))
    )
    check_request(request, packed=True)
    packed = PackedGpus(request)
    gpus = {gpu.gpu_id: gpu for gpu in packed.of_partition("main")}
    assert [sorted(gpu.tenants) for gpu in gpus.values()] == [[1], [1, 2], [], []]
    assert (gpus[1].mem_gib, gpus[1].left_gib) == (1.0 + 2.0 + 4 * 0.5, 11.0)
    assert packed.holdings[2].partners == (first,)
    assert ([gpu.gpu_id for gpu in packed.holdings[1].own_gpus], packed.free.total("main")) == ([0], 2)


def test_memory_asked_for_after_an_error_counts_before_the_batch_model():
    assert mem_gib_of(make_job(1)) == 1.0
    assert mem_gib_of(make_job(1, batch=BATCH), 2) == 6.0
    assert mem_gib_of(make_job(1, batch=BATCH, gpu_mem_request_gib=9.0), 2) == 9.0
    assert mem_gib_of(make_job(1, batch=BatchModel(16, 0.1, 0.01))) == 1.0  # it says nothing of memory
    assert mem_gib_of(make_job(1, None)) == 0.0


def test_free_gpus_are_taken_where_they_fit_best():
    packed = PackedGpus(make_request([], [make_cluster_node("n1", 4), make_cluster_node("n2", 2, 1)]))
    assert packed.put_on_free(make_job(1, gpu_count=2)).shares == (NodeShare("n2", 2, (0, 1)),)
    assert packed.put_on_free(make_job(2)).shares == (NodeShare("n1", 1, (0,)),)
    assert packed.put_on_free(make_job(3, gpu_count=2)).shares == (NodeShare("n1", 2, (2, 3)),)
    assert packed.put_on_free(make_job(4, gpu_count=2)) is None
    packed.take(1)
    assert packed.put_on_free(make_job(4), gpu_count=2).shares == (NodeShare("n2", 2, (0, 1)),)


@given(st.lists(st.tuples(st.integers(1, 9), st.sets(st.integers(0, 7), min_size=1)), max_size=20))
def test_what_comes_and_goes_leaves_nothing_behind(moves):
    packed = PackedGpus(make_request([], [make_cluster_node("n1", 4), make_cluster_node("n2", 4)]))
    gpus = packed.of_partition("main")
    for job_id, chosen in moves:
        if job_id in packed.holdings:
            packed.take(job_id)
        else:
            packed.put(make_job(job_id, gpu_count=len(chosen)), [gpus[index] for index in chosen])
        assert packed.free.total("main") == sum(not gpu.tenants for gpu in gpus)
        assert all(gpu.mem_gib == len(gpu.tenants) for gpu in gpus)
    for job_id in list(packed.holdings):
        packed.take(job_id)
    whole = packed.put_on_free(make_job(99, gpu_count=8), gpu_count=4)
    assert whole.shares == shares_of(whole.gpus) == (NodeShare("n1", 4, (0, 1, 2, 3)),)
    assert all(gpu.mem_gib == 0 for gpu in gpus if gpu.node == "n2")


@pytest.mark.parametrize(
    ("node", "running", "message"),
    [
        (make_node("n1", 2), (), "node n1: 2 GPUs are free, but islands doesn't say which"),
        (busy_node(), [runs(make_job(1), 7)], "GPU 7 is held by a running job but not in topology"),
        (
            busy_node(),
            [Running((make_job(1, gpu_count=2),), (NodeShare("n1", 1, (0,)), NodeShare("n1", 1, (1,))))],
            "job 1 holds two shares of n1",
        ),
    ],
)
def test_requests_that_do_not_say_which_gpus_are_refused(node, running, message):
    with pytest.raises(RequestError, match=message):
        check_request(make_request([], [node], running=tuple(running)), packed=True)
