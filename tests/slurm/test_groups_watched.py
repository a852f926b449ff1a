"""A group is watched: on a login host, where Slurm's records suffice, through srun, by root and by the controller."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from muri_cluster import MuriCluster
from sandboxes import on_sites

from sandbox.driver import Driver


@contextmanager
def running_group(muri: MuriCluster, gpu_type: str = "gpu") -> Iterator[tuple[list[int], int]]:
    """Two members at work, of which their pilot job has reported; their ids and the pilot's."""
    with muri.training():
        jobs, pilot = muri.start_group("load", "propagate", gpu_type=gpu_type)
        muri.driver.wait_until(lambda: all(muri.queue()[job]["measured_speed"] for job in jobs), "measured speeds")
        yield jobs, pilot
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of the pilot job")


@on_sites("forky", "trixie")
def test_a_group_is_told_from_slurms_records(site: Driver) -> None:
    """By a host of its own, with neither pyslurm nor anything that a controller or a node has written."""
    muri = MuriCluster(site)
    muri.occupy(on="login")

    def told(*command: str) -> str:
        done = site.run("muri", *command, on="login")
        assert done.stderr == ""
        return done.stdout

    with running_group(muri, "tesla") as (jobs, pilot):
        waiting = muri.submit("preprocess", "--hold")
        late = muri.submit("synchronize")
        status = json.loads(told("queue", "--json"))
        shown = {job["job_id"]: job for job in status["jobs"]}
        assert status["cycle_s"] == 0
        for job, partner in (jobs, jobs[::-1]):
            seen = shown[job]
            assert (seen["state"], seen["group"], seen["partners"]) == ("interleaved", pilot, [partner])
            assert 0 < seen["predicted_speed"] <= 1
            assert seen["measured_speed"]
            assert any("γ" in reason for reason in seen["reasons"])
        assert shown[waiting]["state"] == "user-held"
        assert "no controller has left its plans on this machine" in told("queue")
        explained = told("explain", str(jobs[0]))
        assert f"It shares the GPUs of pilot job {pilot} with {jobs[1]}." in explained
        assert all(words in explained for words in ("planned", "γ", "Milliseconds per iteration"))
        why = told("explain", str(late))
        assert "Slurm's reason is" in why
        assert f"`muri explain {late}` there tells more" in why
        top = told("top", "--once")
        assert "No group runs on this host" in top
        assert f"Group of pilot job {pilot} on n1: " in top
        assert max(map(len, top.splitlines())) <= 80
        (group,) = json.loads(told("top", "--json"))
        assert set(group["members"]) == set(map(str, jobs))
        nobody = site.run("muri", "top", user="bob", check=False, on="login")
        assert (nobody.returncode, nobody.stdout) == (1, "")


@on_sites("forky", "trixie")
def test_a_job_alone_says_why(site: Driver) -> None:
    muri = MuriCluster(site)
    muri.know_profiles(gpu_type="tesla")
    muri.configure(policy="fifo")
    with muri.training():
        job = muri.submit("load", iterations=5)
        muri.cycle()
        site.wait_state(job, "RUNNING")
        texts = (muri.explain(job, user="root"), site.run("muri", "explain", str(job), on="login").stdout)
        assert "muri-plan:" in site.run("scontrol", "show", "job", str(job)).stdout
    here, there = ([line for line in text.splitlines() if line.startswith("- ")] for text in texts)
    assert here == there


def test_a_killed_pilot_is_no_group_and_its_successor_tidies_up(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    with running_group(muri) as (jobs, pilot):
        status = f"/run/muri/1001/pilot-{pilot}.json"
        runtime = json.loads(muri.driver.read(status))["pid"]
        muri.driver.run("pkill", "-KILL", "-f", f"muri.slurm_plugin.node.pilot.*{jobs[0]}", user="root")
        muri.driver.run("kill", "-KILL", str(runtime), user="root", check=False)
        muri.driver.wait_state(pilot)
        muri.driver.wait_until(
            lambda: muri.driver.run("muri", "top", "--once", user="alice", check=False).returncode == 1, "an empty top"
        )
        assert muri.driver.run("test", "-e", status, user="root", check=False).returncode == 0
        muri.driver.run("scancel", *map(str, jobs), user="alice")
        muri.driver.run("touch", "--date=1 minute ago", status, user="root")  # Slurm is not asked about younger ones
    with running_group(muri):
        assert muri.driver.run("test", "-e", status, user="root", check=False).returncode == 1


def test_group_is_watched_by_its_user_by_root_and_by_the_controller(muri: MuriCluster) -> None:
    muri.configure(pilot={"trace": True})
    with muri.training():
        jobs, pilot = muri.start_group("load", "propagate")
        watch(muri, jobs, pilot)
    muri.driver.wait_until(lambda: not muri.pilots(), "the end of the pilot")
    (trace,) = muri.driver.run("sh", "-c", f"ls /run/muri/1001/pilot-{pilot}.trace.json", user="root").stdout.split()
    events = json.loads(muri.driver.read(trace))
    assert {f"job {job}" for job in jobs} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def watch(muri: MuriCluster, jobs: list[int], pilot: int) -> None:
    names = {str(job) for job in jobs}

    def told() -> bool:
        shown = [muri.queue()[job] for job in jobs]
        measured = all(job["measured_speed"] and job["iterations"] and job["use"] for job in shown)
        return measured and all(job["use"]["cpu_cores"] is not None for job in shown)  # a rate needs two looks

    muri.driver.wait_until(told, "measured speeds and what the members use in the queue")
    use = muri.queue()[jobs[0]]["use"]
    assert use["mem_gib"] > 0
    assert (use["gpu_utilization"], use["gpu_mem_gib"]) == (None, None)  # the sandbox's GPUs are stand-ins
    top = ("srun", "--overlap", f"--jobid={pilot}", "muri", "top")
    groups = json.loads(muri.driver.run(*top, "--json", user="alice").stdout)
    # A pilot job of another test that was killed less than ten seconds ago may still be shown.
    (group,) = (group for group in groups if group["pilot_job"] == str(pilot))
    assert set(group["members"]) == set(group["use"]["jobs"]) == names
    assert all(0 < member["speed"] <= 1.2 and member["predicted_speed"] for member in group["members"].values())
    assert group["use"]["node"]["cpu_cores"] > 0
    plain = muri.driver.run(*top, user="alice").stdout
    assert f"Group of pilot job {pilot}" in plain
    assert max(map(len, plain.splitlines())) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in plain.splitlines() if line.strip()}  # the lower table is last
    assert "/" in rows["node"][0]
    assert rows[str(jobs[0])][3:] == ["-", "-", "-"]
    assert f"Group of pilot job {pilot}" in muri.driver.run("muri", "top", user="root").stdout
    nobody = muri.driver.run("muri", "top", user="bob", check=False)
    assert nobody.returncode == 1
    assert "srun --overlap" in nobody.stderr
    said = muri.explain(jobs[0])
    for words in ("iterations done in this group", "Milliseconds per iteration", "It uses "):
        assert words in said
