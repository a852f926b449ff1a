"""A group on a real Slurm is watched from outside: `muri top` through srun, measured speeds, a trace."""

import json

from muri_cluster import MuriCluster


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
    assert (use["gpu_utilisation"], use["gpu_mem_gib"]) == (None, None)  # the sandbox's GPUs are stand-ins
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
