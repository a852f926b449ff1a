"""A hostile user on a real Slurm: alice's jobs end, no cycle is lost, nothing of root's reaches bob."""

import pytest
from muri_cluster import MuriCluster
from real_campaign import run

from sandbox.driver import Driver


@pytest.mark.parametrize("gateway", ["command", pytest.param("pyslurm", marks=pytest.mark.thorough)])
def test_hostile_jobs_harm_nobody(one_gpu: Driver, gateway: str) -> None:
    outcome = run(MuriCluster(one_gpu), gateway, seed=1, hostile=40, ordinary=4)
    assert not outcome.failures, "\n".join(outcome.failures)
    assert outcome.hostile >= 20
    assert set(outcome.ordinary.values()) == {"COMPLETED"}
