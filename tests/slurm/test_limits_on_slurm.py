"""The site's limits on a real Slurm with accounting: what is read, and whether Slurm and SiteRoom agree."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from muri.slurm_plugin.planning.site_limits import SiteRoom
from muri.slurm_plugin.records.cluster import parse_snapshot
from muri.slurm_plugin.records.limits import Association, Tres, is_limit_reason, is_limit_refusal
from muri.slurm_plugin.records.roles import View, view_of
from sandbox.driver import CommandError, Driver


def seen(driver: Driver, gateway: str = "auto") -> View:
    """The queue and the limits as Muri reads them."""
    driver.write("/root/muri.yaml", f"gateway: {gateway}\n", user="root")
    taken = driver.run("muri", "plan", "--save=-", "--config=/root/muri.yaml", user="root")
    return view_of(parse_snapshot(taken.stdout))


@contextmanager
def setting(driver: Driver, qos: str, name: str, value: str) -> Iterator[None]:
    """Within, a QOS has a limit."""

    def change(to: str) -> None:
        driver.run("sacctmgr", "--immediate", "modify", "qos", qos, "set", f"{name}={to}", user="root")

    change(value)
    try:
        yield
    finally:
        change("-1")


@pytest.mark.parametrize(
    ("fixture", "gateway"),
    [("accounting_sandbox", "command"), ("accounting_sandbox", "pyslurm"), ("old_accounting_sandbox", "command")],
)
def test_limits_are_read(fixture: str, gateway: str, request: pytest.FixtureRequest) -> None:
    limits = seen(request.getfixturevalue(fixture), gateway).snapshot.limits
    qos = {each.name: each.limits for each in limits.qos}
    assert (limits.enforced, limits.why_unknown) == (True, "")
    assert qos["short"].max_wall_s == 3600
    assert qos["small"].max_tres_per_user == (Tres("gres/gpu", 2),)
    assert {"main", "train"} <= {each.name for each in limits.partitions}
    assert Association("hep", parent="root") in limits.associations
    assert Association("hep", "alice") in limits.associations


def test_slurm_and_muri_agree_who_has_no_room(accounted: Driver) -> None:
    """Both see the same jobs wait for a limit of their QOS, and others not."""
    with setting(accounted, "short", "MaxJobsPerUser", "1"):
        jobs = [accounted.submit("--qos=small", "--gres=gpu:1", "--wrap=sleep 600") for _ in range(3)]
        jobs += [accounted.submit("--qos=short", "--time=5", "--wrap=sleep 600") for _ in range(2)]
        jobs += [accounted.submit("--qos=small", "--gres=gpu:1", "--wrap=sleep 600", user="bob")]
        accounted.wait_until(lambda: is_limit_reason(accounted.job(jobs[2])["Reason"]), "the limit on GPUs")
        accounted.wait_until(lambda: is_limit_reason(accounted.job(jobs[4])["Reason"]), "the limit on jobs")
        accounted.wait_state(jobs[5], "RUNNING")
        view = seen(accounted)
        room = SiteRoom(view)
        waiting = {job_id for job_id in jobs if view.jobs[job_id].state == "PENDING"}
        assert waiting == {jobs[2], jobs[4]}
        assert room.why_no_room(view.jobs[jobs[2]]) == (
            "QOS small allows 2 GPUs for each user (MaxTRESPerUser), alice would have 3"
        )
        assert room.why_no_room(view.jobs[jobs[4]]) == (
            "QOS short allows 1 running jobs for each user (MaxJobsPerUser), alice would have 2"
        )


def test_slurms_refusal_for_a_limit_is_known_as_one(accounted: Driver) -> None:
    with setting(accounted, "small", "MaxSubmitJobsPerUser", "1"):
        accounted.submit("--qos=small", "--hold", "--wrap=true")
        with pytest.raises(CommandError) as refused:
            accounted.submit("--qos=small", "--hold", "--wrap=true")
    assert "QOSMaxSubmitJobPerUserLimit" in str(refused.value)
    assert is_limit_refusal(str(refused.value))
