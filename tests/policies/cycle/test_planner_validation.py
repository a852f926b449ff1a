"""Requests that contradict themselves are refused with the place of the error and what to do."""

import pytest
from policy_builders import make_job, make_node, make_request

from muri.policies import schedulers as priority
from muri.policies.cycle.planner import plan_queue
from muri.policies.cycle.validation import RequestError
from muri.policies.options import PolicyOptions
from muri.policies.types import NodeShare, Running

BUSY = make_node("n1", 0, gpu_count=2)


def refuse(message, jobs=(), nodes=(BUSY,), *, blamed=None, **changes):
    """`blamed` is the job without which the request would be valid in this respect; None: no single one."""
    with pytest.raises(RequestError, match=message) as caught:
        plan_queue(make_request(jobs, nodes, **changes), "test", priority.fifo, PolicyOptions())
    assert caught.value.job_id == blamed


def runs(job, *shares):
    return Running((job,), shares or (NodeShare("n1", job.gpu_count),))


def test_a_key_that_is_no_number_is_refused_rather_than_sorted_anyhow():
    def key(job):
        return (float("nan") if job.job_id == 2 else 0.0,)

    with pytest.raises(RequestError, match=r"the policy's key of job 2 is not a number \(NaN\)") as caught:
        plan_queue(make_request([make_job(n) for n in (1, 2, 3)], [make_node("n1", 1)]), "test", key, PolicyOptions())
    assert caught.value.job_id == 2


@pytest.mark.parametrize(
    ("running", "blamed", "message"),
    [
        (
            [runs(make_job(1), NodeShare("n7", 1))],
            1,
            "job 1 runs on node n7, which is not among the request's nodes; list",
        ),
        ([runs(make_job(1)), runs(make_job(1))], 1, "job 1 appears more than once"),
        ([runs(make_job(1, gpu_count=3))], None, "node n1: running jobs hold 3 GPUs and 0 are free, but it has 2"),
        ([runs(make_job(1, gpu_count=2), NodeShare("n1", 1))], 1, "job 1 runs on 1 GPUs but its gpu_count is 2"),
        ([runs(make_job(1, restart_s=float("nan")))], 1, "job 1: restart_s is nan; it must be a finite number ≥ 0"),
        ([runs(make_job(1, waiting_since_s=-1.0))], 1, "job 1: waiting_since_s is -1.0"),
        ([runs(make_job(1), NodeShare("n1", 1, (0, 1)))], 1, r"job 1 holds 1 GPUs of n1 but gpu_ids is \(0, 1\)"),
        ([runs(make_job(1, gpu_count=2), NodeShare("n1", 2, (1, 1, 2)))], 1, r"gpu_ids is \(1, 1, 2\); name each one"),
        (
            [runs(make_job(n), NodeShare("n1", 1, (0,))) for n in (1, 2)],
            2,
            "GPU 0 is held by job 2 and by another running job",
        ),
        ([Running((), (NodeShare("n1", 1),))], None, "a running unit has no members"),
        (
            [Running((make_job(1), make_job(2, gpu_count=2)), (NodeShare("n1", 1),))],
            1,
            "job 1 runs in a group whose members differ in gpu_count",
        ),
        ([runs(make_job(1), NodeShare("n1", 2), NodeShare("n1", -1))], 1, "gpu_count of a share must be ≥ 1"),
    ],
)
def test_running_units_that_cannot_be_are_named(running, blamed, message):
    refuse(message, running=tuple(running), blamed=blamed)


def test_a_job_cannot_both_wait_and_run():
    refuse("job 1 appears more than once; every job must appear exactly once, waiting or running",
           [make_job(1)], running=(runs(make_job(1)),), blamed=1)  # fmt: skip


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (make_node("n1", 2, islands=((0, 1, 2),)), "islands list 3 GPUs but free_gpus is 2"),
        (make_node("n1", 2, islands=((0,), (0,))), "GPU 0 is in two islands"),
        (make_node("n1", 2, islands=((0,), (5,)), topology=((0, 1),)), "GPU 5 is in islands but not in topology"),
        (make_node("n1", 2, gpu_count=2, topology=((0, 1, 2),)), "topology lists 3 GPUs but the node has 2"),
        (make_node("n1", 2, gpu_mem_gib=float("nan")), "gpu_mem_gib is nan"),
        (make_node("n1", 0, gpu_count=-1), "gpu_count is -1"),
        (make_node("n1", -1), "free_gpus is -1"),
        (make_node("n1", 3, gpu_count=2), "3 free GPUs but only 2"),
    ],
)
def test_nodes_that_cannot_be_are_named(node, message):
    refuse(f"node n1: {message}", nodes=[node])


def test_a_gpu_is_either_free_or_held():
    node = make_node("n1", 1, gpu_count=2, islands=((0,),))
    refuse("node n1: GPU 0 is both free and held", nodes=[node], running=(runs(make_job(1), NodeShare("n1", 1, (0,))),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interval_s": -1.0}, "interval_s is -1.0"),
        ({"interval_s": float("nan")}, "interval_s is nan"),
        ({"now_s": float("inf")}, "now_s is inf"),
        ({"max_group_size": 0}, "max_group_size is 0"),
        ({"nodes": (BUSY, BUSY)}, "node n1 appears more than once"),
        ({"larger_than_a_node": "slrum"}, "larger_than_a_node is 'slrum'; valid are: slurm, whole-nodes"),
    ],
)
def test_a_frame_that_cannot_be_is_named(changes, message):
    refuse(message, **changes)


def test_more_gpus_than_the_partition_has():
    nodes, large = [make_node("n1", 2), make_node("n2", 4)], make_job(5, gpu_count=7)
    message = "job 5 needs 7 GPUs, but partition main has 6 in all; it must be 1 to 6"
    refuse(message, [large], nodes, larger_than_a_node="whole-nodes", blamed=5)
    (solo,) = plan_queue(make_request([large], nodes), "test", priority.fifo, PolicyOptions()).solo
    assert "larger than a node" in str(solo.reasons[0])
