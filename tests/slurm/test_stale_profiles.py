"""On a real Slurm: live drift is seen and measured again once, and a damaged store costs no job."""

import json

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import DeadlineError, Driver


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    return MuriCluster(one_gpu)


def store(muri: MuriCluster, *command: str) -> str:
    """Run a verb of `muri profile` on the controller's store."""
    path = f"{muri.state_dir}/profiles.db"
    return muri.driver.run("muri", "profile", *command, "--store", path, user="root").stdout


def dry_runs(muri: MuriCluster) -> set[str]:
    """Names of the dry-run jobs that slurmctld remembers, ended ones too."""
    text = muri.driver.run("squeue", "-h", "-t", "all", "-n", "muri-dryrun", "-o", "%i", user="root").stdout
    return set(text.split())


def know(muri: MuriCluster, **load_s: float) -> None:
    """Import profiles of models by the time that loading takes; the scripts take 10 ms for each other stage."""
    common = {"batch_size": 8, "gpu_count": 1, "gpu_type": "gpu", "iteration_s": 0.2}
    rest = {"preprocess_s": 0.01, "propagate_s": 0.07, "synchronize_s": 0.01}
    profiles = [{"model": model, "load_s": value, **common, **rest} for model, value in load_s.items()]
    text = json.dumps({"schema": "muri-profiles", "version": 1, "profiles": profiles})
    path = f"{muri.state_dir}/profiles.db"
    muri.driver.run("muri", "profile", "import", "-", "--store", path, user="root", stdin=text)


def cycles_until(muri: MuriCluster, logged: str) -> None:
    """Have a controller at work until it logs a text; on failure the test shows all that it logged."""
    with muri.controller():
        try:
            muri.driver.wait_until(lambda: logged in muri.controller_log(), "the log")
        except DeadlineError:
            pytest.fail(f"no cycle logged {logged!r}, only:\n{muri.controller_log()}")


def test_drift_of_a_running_group_is_measured_again_once(muri: MuriCluster) -> None:
    # A limit that a loaded machine does not reach by itself.
    profiles = {"drift_after_s": 4.0, "drift_limit": 1.5}
    muri.configure(
        profiles=profiles, profiling={"partition": "measure"}, grouping={"wait_for_profiles_s": 0, "discipline": "fair"}
    )
    know(muri, load=0.02, propagate=0.01)  # loading takes 70 ms in the script of the first
    before = dry_runs(muri)
    jobs = [muri.submit("load", iterations=1000), muri.submit("propagate", iterations=1000)]
    muri.cycle()
    muri.wait_grouped(*jobs)
    cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu) is stale")
    (mark,) = json.loads(store(muri, "stale", "--json"))["stale"]
    assert (mark["model"], mark["who"]) == ("load", "drift")
    assert mark["reason"].startswith("load took ")
    assert dry_runs(muri) == before  # nobody waits with that model, nothing to measure it with

    muri.driver.run("scancel", *map(str, jobs), user="alice")
    later = [muri.submit("load", iterations=30), muri.submit("load", iterations=30)]
    cycles_until(muri, "profile of load of alice (batch 8, 1 × gpu): stored")
    assert json.loads(store(muri, "stale", "--json"))["stale"] == []
    fields = muri.cycles_until_ended(*later)
    assert {job["JobState"] for job in fields.values()} == {"COMPLETED"}
    muri.cycles_until_ended(muri.submit("load", iterations=5))  # fresh again: no second dry run
    assert len(dry_runs(muri) - before) == 1
    shown = json.loads(store(muri, "show", "load", "--user", "alice", "--json"))
    assert shown["source"] == "dry-run"
    assert shown["load_s"] > 0.05


def test_a_damaged_store_is_set_aside_and_no_job_is_lost(muri: MuriCluster) -> None:
    know(muri, load=0.07, propagate=0.01)
    path = f"{muri.state_dir}/profiles.db"
    muri.driver.run("sh", "-c", f"head -c 20000 /dev/urandom > {path}; rm -f {path}-wal {path}-shm", user="root")
    examined = muri.driver.run("muri", "doctor", "--json", user="root", check=False)
    found = {item["name"]: item["level"] for item in json.loads(examined.stdout)["findings"]}
    assert (examined.returncode, found["profile store"], found["Slurm"]) == (1, "problem", "ok")
    jobs = [muri.submit("load", iterations=30), muri.submit("propagate", iterations=30)]
    assert "it was set aside as" in muri.cycle().stderr
    fields = muri.cycles_until_ended(*jobs)
    assert {(job["JobState"], job["Restarts"]) for job in fields.values()} == {("COMPLETED", "0")}
    assert all(muri.output(job).count("started") == 1 for job in jobs)
    names = muri.driver.run("ls", muri.state_dir, user="root").stdout.split()
    assert len([name for name in names if name.startswith("profiles.db.damaged-")]) == 1
    assert {item["model"] for item in json.loads(store(muri, "list", "--json"))["profiles"]} == {"load", "propagate"}
