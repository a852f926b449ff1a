"""AntMan on a real Slurm: jobs of both classes share a GPU, and the guaranteed one goes first."""

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver


@pytest.mark.parametrize("opportunistic_first", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_guaranteed_job_goes_first_whoever_came_first(one_gpu: Driver, opportunistic_first: bool) -> None:
    muri = MuriCluster(one_gpu)
    # These scripts only sleep in their stages: without turns both would get all of their speed, as auto finds out.
    muri.configure(policy="antman", grouping={"min_speed": 0, "discipline": "fair"})
    muri.know_profiles()

    def submit(*, opportunistic: bool) -> int:
        """A job that has the GPU for 70 % of its time: beside another the second gets on at 0.43 at best."""
        mark = "--muri=model=propagate,batch-size=8" + (",opportunistic=1" if opportunistic else "")
        script = ("/home/alice/train.sh", "5", "0", "propagate")
        return muri.driver.submit("-p", "train", "--gres=gpu:1", mark, *script)

    with muri.training():
        first = submit(opportunistic=opportunistic_first)
        muri.cycle()
        muri.wait_grouped(first)
        (pilot,) = muri.pilots()
        # Only one of each class shares: the other waits.
        second, other = (submit(opportunistic=not opportunistic_first) for _ in range(2))
        muri.cycle()
        muri.wait_grouped(second)
        guaranteed, opportunistic = (second, first) if opportunistic_first else (first, second)

        def guaranteed_goes_first() -> bool:
            shown = muri.queue()
            speeds = [shown[job]["measured_speed"] or 0.0 for job in (guaranteed, opportunistic)]
            return (shown[opportunistic]["iterations"] or 0) > 5 and speeds[0] > 1.5 * speeds[1] > 0

        # Without classes both would get on at 0.71. At first the one that was alone still shows its earlier speed.
        muri.driver.wait_until(guaranteed_goes_first, "a guaranteed job that is much faster than the other")
        shown = muri.queue()
        assert muri.pilots() == [pilot]
        assert (shown[first]["partners"], shown[other]["state"]) == ([second], "waiting")
        assert [shown[job]["opportunistic"] for job in (guaranteed, opportunistic)] == [False, True]
        assert [shown[job]["promised_speed"] for job in (guaranteed, opportunistic)] == [0.95, None]
        assert "It only uses leftover resources (opportunistic)" in muri.explain(opportunistic)
        assert muri.driver.job(first)["Restarts"] == "0"
        muri.driver.run("scancel", str(other), user="alice")
    ended = muri.cycles_until_ended(first, second)
    assert {fields["JobState"] for fields in ended.values()} == {"COMPLETED"}
