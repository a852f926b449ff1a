"""On a real Slurm: live drift is seen and measured again once."""

import json
from typing import Any

from muri_cluster import DRY_RUNS, MuriCluster

from muri.profiler.records import ProfileKey, StageProfile

pytestmark = DRY_RUNS


def profile(model: str, load_s: float) -> StageProfile:
    """The scripts take 10 ms for each stage but the slow one; a loaded machine does not reach more than twice these."""
    return StageProfile(ProfileKey(model, 8, 1, "gpu"), load_s, 0.03, 0.07, 0.03, iteration_s=0.2)


def cycles_until(muri: MuriCluster, logged: str) -> None:
    """Have a controller at work until it logs a text."""
    with muri.controller():
        muri.driver.wait_until(lambda: logged in muri.controller_log(), f"{logged!r} in the log")


def mark_of_load(muri: MuriCluster, user: str) -> dict[str, Any] | None:
    """Why a user's profile of `load` is to be measured again, and who says so; None where it is fresh."""
    mark: dict[str, Any] | None = json.loads(muri.profile("show", "load", "--user", user, "--json"))["stale"]
    return mark


def test_drift_of_a_running_group_is_measured_again_once(muri: MuriCluster) -> None:
    tuning = {"drift_after_s": 4.0, "drift_limit": 1.5, "wait_for_profiles_s": 0}
    muri.configure(tuning=tuning, profiling={"partition": "measure"}, grouping={"discipline": "fair"})
    muri.know(profile("load", 0.02), profile("propagate", 0.03))  # loading takes 70 ms in the script of the first
    before = muri.dry_runs()
    with muri.training():
        jobs = [muri.submit("load"), muri.submit("propagate")]
        muri.cycle()
        muri.wait_grouped(*jobs)
        cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu) is stale")
        mark = mark_of_load(muri, "all")
        assert mark is not None
        assert mark["who"] == "drift"
        assert mark["reason"].startswith("load took ")
        assert muri.dry_runs() == before  # no job of that model waits, nothing to measure it with
        muri.driver.run("scancel", *map(str, jobs), user="alice")

    later = [muri.submit("load", iterations=30), muri.submit("load", iterations=30)]
    cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu): stored")
    assert mark_of_load(muri, "alice") is None
    fields = muri.cycles_until_ended(*later)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    muri.cycles_until_ended(muri.submit("load", iterations=5))  # fresh again: no second dry run
    assert len(muri.dry_runs() - before) == 1
    shown = muri.models("--user", "alice")["load"]
    assert shown["source"] == "dry-run"
    assert shown["load_s"] > 0.05
