"""Cycles on events on a real Slurm: jobs start soon after an arrival or an end, although the next cycle is far away."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from muri_cluster import MuriCluster, keep_gate
from sandboxes import on_both_releases

from sandbox.driver import Driver

NOTICE = "/run/muri/notice"
INTERVAL_S = 360.0

MAKE_NOTICE = """\
from pathlib import Path
from muri.slurm_plugin.controller.events import make_notice_file, slurm_settings, slurm_user
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands

make_notice_file(Path("/run/muri/notice"), slurm_user(slurm_settings(SlurmCommands())))
"""

COUNT_ENDS = """\
from muri.slurm_plugin.controller.events import ended_in
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands

print(ended_in(SlurmCommands().run("count ended jobs", ["sdiag"])))
"""


@pytest.fixture
def muri(muri: MuriCluster) -> MuriCluster:
    muri.know_profiles()
    muri.configure(interval_s=INTERVAL_S, grouping={"max_group_size": 2, "join": False})
    return muri


@contextmanager
def at_work(muri: MuriCluster, options: str) -> Iterator[None]:
    """Have a controller whose first cycle is over."""
    with muri.controller(options):
        muri.driver.wait_until(lambda: is_there(muri.driver, f"{muri.state_dir}/status.json"), "the first cycle")
        yield


def is_there(driver: Driver, path: str) -> bool:
    return driver.run("test", "-e", path, user="root", check=False).returncode == 0


def seconds_to_start(muri: MuriCluster, job: int, ended: int | None = None) -> float:
    """From a job's submission, or another's end, to its start, as Slurm notes them."""
    fields = muri.driver.job(job)
    begun = fields["SubmitTime"] if ended is None else muri.driver.job(ended)["EndTime"]
    begun_s, start_s = (time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) for text in (begun, fields["StartTime"]))
    print(f"job {job}: {start_s - begun_s:.0f} s from {'its submission' if ended is None else f'the end of {ended}'}")
    return start_s - begun_s


@on_both_releases
@pytest.mark.parametrize("form", ["--events", pytest.param("--interval 360", marks=pytest.mark.thorough)])
def test_arrivals_and_ends_are_not_left_to_the_next_cycle(muri: MuriCluster, form: str) -> None:
    with at_work(muri, form):
        with muri.training():
            alone = muri.submit("load")
            muri.driver.wait_state(alone, "RUNNING")
            members = [muri.submit(kind) for kind in ("load", "propagate")]
            muri.driver.run("scancel", str(alone))
            muri.wait_grouped(*members)
            (pilot,) = muri.pilots()
            last = muri.submit("load", iterations=10)
        assert muri.driver.wait_state(last)["JobState"] == "COMPLETED"
    assert seconds_to_start(muri, alone) < INTERVAL_S / 2
    assert seconds_to_start(muri, pilot, ended=alone) < INTERVAL_S / 2
    assert seconds_to_start(muri, last, ended=pilot) < INTERVAL_S / 2


UNSTEADY_PY = """\
import os, time
import muri

for step in range(20):
    with muri.stage("load"):
        time.sleep(0.05 + 0.4 * (step % 2))
while os.path.exists(os.path.expanduser("~/keep-training")):
    time.sleep(0.1)
"""


def test_the_first_means_of_a_model_never_seen_cause_a_cycle_although_they_are_not_sure(muri: MuriCluster) -> None:
    muri.configure(interval_s=INTERVAL_S, profiling={"mode": "in-place"})
    script = muri.script("unsteady", UNSTEADY_PY)
    with at_work(muri, "--events"), muri.training():
        job = muri.driver.submit("-p", "train", "--gres=gpu:1", "--muri=model=unsteady,batch-size=8", script)
        muri.driver.wait_until(lambda: "unsteady" in muri.models("--user", "alice"), "a cycle after the measurement")
        found = muri.models("--user", "alice")["unsteady"]
        assert muri.driver.job(job)["JobState"] == "RUNNING"
    assert found["source"] == "in-place"
    assert found["detail"]["confidence"] < 0.95
    assert muri.driver.wait_state(job)["JobState"] == "COMPLETED"


def test_the_timers_cycles_go_on_beside_the_process_that_watches(muri: MuriCluster) -> None:
    with at_work(muri, "--events"):
        second = muri.driver.run("muri-controller", "--events", user="root")
        assert "another controller" in second.stderr
        muri.cycle()
        found = muri.driver.run("muri", "doctor", "--json", user="root", check=False).stdout
        assert "a cycle follows an arrival or an end within seconds" in found
    found = muri.driver.run("muri", "doctor", "--json", user="root", check=False).stdout
    assert "nothing watches for them" in found


def written_ns(driver: Driver) -> str:
    return driver.run("stat", "-c", "%U %a %s %y", NOTICE, user="root", on="ctl").stdout


@pytest.fixture
def noticed(site: Driver) -> Iterator[Driver]:
    """A site whose slurmctld runs as SlurmUser, and whose controller has made the notice file."""
    keep_gate(site)
    site.run("python", "-c", MAKE_NOTICE, user="root", on="ctl")
    yield site
    site.run("rm", "-rf", NOTICE, user="root", on="ctl")


def submit(site: Driver, *options: str) -> int:
    return site.submit("-p", "train", "--gres=gpu:1", *options, "--wrap=sleep 300", on="login")


def test_slurmctld_gives_notice_of_jobs_of_muris_and_of_no_others(noticed: Driver) -> None:
    before = written_ns(noticed)
    assert before.startswith("root 660 1 ")
    submit(noticed)
    assert written_ns(noticed) == before
    submit(noticed, "--muri=model=a")
    after = written_ns(noticed)
    assert after.startswith("root 660 1 ")
    assert after != before


def test_no_submission_fails_for_want_of_a_notice(noticed: Driver) -> None:
    for hindrance in ("true", "ln -s /dev/full", "mkdir", "mkfifo -m 666", "install -m 0 /dev/null"):
        noticed.run("sh", "-c", f"rm -rf {NOTICE}; {hindrance} {NOTICE}", user="root", on="ctl")
        for _ in range(3):
            fields = noticed.job(submit(noticed, "--muri=model=a"))
            assert fields["JobState"] == "PENDING"
            assert "muri-gate:licence" in fields["AdminComment"]


@pytest.mark.parametrize(
    ("command", "state"),
    [
        ("true", "COMPLETED"),
        ("false", "FAILED"),
        ("sleep 300", "CANCELLED"),
        pytest.param("sleep 300", "TIMEOUT", marks=pytest.mark.thorough),  # a limit is a minute at least
    ],
)
def test_slurmctld_counts_each_kind_of_end(site: Driver, command: str, state: str) -> None:
    def ended() -> int:
        return int(site.run("python", "-c", COUNT_ENDS, user="root", on="ctl").stdout)

    before = ended()
    job = site.submit("-p", "gpu", "--gres=gpu:1", "--time=1", f"--wrap={command}")
    if state == "CANCELLED":
        site.wait_state(job, "RUNNING")
        site.run("scancel", str(job))
    site.wait_state(job, state)
    site.wait_until(lambda: ended() > before, f"a count of {state}")
