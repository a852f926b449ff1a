"""In which order a cycle's actions are carried out: what its budget may cut off comes last."""

from typing import Any, cast

from muri.slurm_plugin.planning.actions import Join, ReleaseSolo
from muri.slurm_plugin.planning.plan_actions import idle_gpus_first


def test_idle_gpus_are_filled_before_jobs_join_those_at_work() -> None:
    first, second = (Join(pilot, "n1", cast(Any, None), (), 0, ()) for pilot in (8, 9))
    alone, other = ReleaseSolo(1, ()), ReleaseSolo(2, ())
    assert idle_gpus_first((first, alone, second, other)) == (alone, other, first, second)
