"""A group on a real Slurm is watched from outside: `muri top` through srun, measured speeds, a trace."""

import json

from muri_cluster import MuriCluster

from sandbox.driver import Driver


def test_group_is_watched_by_its_user_by_root_and_by_the_controller(one_gpu: Driver) -> None:
    muri = MuriCluster(one_gpu)
    muri.configure(host={"telemetry_s": 1, "poll_s": 0.5, "attach_timeout_s": 240, "trace": True})
    muri.know_profiles()
    jobs = [muri.submit(kind, iterations=4000) for kind in ("load", "propagate")]
    muri.cycle()
    muri.wait_grouped(*jobs)
    (host,) = muri.hosts()
    names = {str(job) for job in jobs}

    def measured() -> bool:
        shown = muri.queue()
        return all(shown[job]["measured_speed"] and shown[job]["iterations"] for job in jobs)

    muri.driver.wait_until(measured, "measured speeds in the queue")

    def used() -> bool:
        shown = [muri.queue()[job]["use"] for job in jobs]
        return all(use is not None and use["cpu_cores"] is not None for use in shown)  # a rate needs two looks

    muri.driver.wait_until(used, "what the members use")
    use = muri.queue()[jobs[0]]["use"]
    assert use["mem_gib"] > 0
    assert (use["gpu_utilisation"], use["gpu_mem_gib"]) == (None, None)  # the sandbox's GPUs are stand-ins
    top = ("srun", "--overlap", f"--jobid={host}", "muri", "top")
    groups = json.loads(muri.driver.run(*top, "--json", user="alice").stdout)
    # A pilot job of another test that was killed less than ten seconds ago may still be shown.
    (group,) = (group for group in groups if group["host_job"] == str(host))
    assert set(group["members"]) == names
    assert all(0 < member["speed"] <= 1.2 for member in group["members"].values())
    assert all(member["predicted_speed"] for member in group["members"].values())
    plain = muri.driver.run(*top, user="alice").stdout
    assert f"Group of pilot job {host}" in plain
    assert max(map(len, plain.splitlines())) <= 80
    assert group["use"]["node"]["cpu_cores"] > 0
    assert set(group["use"]["jobs"]) == names
    rows = {line.split()[0]: line.split()[1:] for line in plain.splitlines() if line.strip()}  # the lower table is last
    assert "/" in rows["node"][0]
    assert rows[str(jobs[0])][3:] == ["-", "-", "-"]
    assert f"Group of pilot job {host}" in muri.driver.run("muri", "top", user="root").stdout
    nobody = muri.driver.run("muri", "top", user="bob", check=False)
    assert nobody.returncode == 1
    assert "srun --overlap" in nobody.stderr
    said = muri.driver.run("muri", "explain", str(jobs[0]), user="alice").stdout
    assert "iterations done in this group" in said
    assert "Milliseconds per iteration" in said
    assert "It uses " in said
    muri.driver.run("scancel", *names, user="alice")
    muri.driver.wait_until(lambda: not muri.hosts(), "the end of the host")
    traces = muri.driver.run("sh", "-c", f"ls /run/muri/1001/host-{host}.trace.json", user="root").stdout.split()
    assert len(traces) == 1
    events = json.loads(muri.driver.run("cat", traces[0], user="root").stdout)
    assert {f"job {job}" for job in jobs} <= {e["args"]["name"] for e in events if e["name"] == "thread_name"}
