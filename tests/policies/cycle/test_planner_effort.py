"""A plan leaves out checks that its caller vouches for, reasons that are not read, and known answers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from policy_builders import cluster_requests, make_job, make_node, make_profile, make_request

from muri.policies import schedulers as priority
from muri.policies.cycle import regrouping
from muri.policies.cycle.planner import plan_queue
from muri.policies.cycle.queue import Bucket, Contender
from muri.policies.cycle.regrouping import Forecasts
from muri.policies.cycle.validation import RequestError
from muri.policies.lockstep import Lockstep
from muri.policies.options import PolicyOptions
from muri.policies.registry import get_policy
from muri.policies.speed import shape_of
from muri.policies.types import Plan


def plan_of(request, rules=None) -> Plan:
    return plan_queue(request, "test", priority.fifo, rules or PolicyOptions())


def test_who_vouches_for_a_request_has_it_planned_unchecked():
    request = make_request([make_job(1, restart_s=-1.0)], [make_node("n1", 1)])
    with pytest.raises(RequestError, match="restart_s is -1"):
        plan_of(request)
    assert [solo.job_id for solo in plan_of(replace(request, trusted=True)).solo] == [1]


def without_reasons(plan: Plan) -> Plan:
    return replace(
        plan,
        groups=tuple(replace(group, reasons=()) for group in plan.groups),
        solo=tuple(replace(solo, reasons=()) for solo in plan.solo),
        waiting=tuple(replace(waiting, reasons=()) for waiting in plan.waiting),
    )


@pytest.mark.parametrize("policy", ["srtf", "auto", "muri-jct", "muri-slurm", "synergy"])
@settings(max_examples=10, deadline=None)
@given(request=cluster_requests())
def test_a_plan_without_reasons_decides_the_same(policy, request):
    chosen = get_policy(policy)
    explained = chosen.plan(request)
    assert without_reasons(chosen.plan(replace(request, explained=False))) == without_reasons(explained)
    for decision in (*explained.groups, *explained.solo, *explained.waiting):
        assert decision.reasons


def members_of(*shapes):
    bucket = Bucket("user", "main", 1)
    return tuple(Contender(rank, make_job(rank), bucket, shape, None) for rank, shape in enumerate(shapes))


def test_forecasts_are_kept_from_plan_to_plan_whatever_numbers_shapes_have(monkeypatch):
    model = Lockstep()
    first, second = (shape_of(make_profile(stage_s)) for stage_s in ((1.0, 0.1, 0.1, 0.0), (0.1, 0.1, 1.0, 0.0)))
    known = Forecasts(model, (first, second)).of(members_of(0, 1))[1]
    again = Forecasts(model, (replace(first, stage_s=(9.0, 1.0, 1.0, 1.0), iteration_s=12.0), first, second))
    assert again.of(members_of(1, 2))[1] == known
    monkeypatch.setattr(regrouping, "_MOST_KNOWN", 2)
    Forecasts(model, (first, second)).prepare([members_of(0), members_of(1)])
    assert len(regrouping._known_of(model)) == 2
