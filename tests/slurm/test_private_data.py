"""PrivateData: Slurm shows ordinary users their own jobs alone, and so does Muri."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from muri_cluster import MuriCluster

from sandbox.driver import Driver

EVERYTHING = "accounts,events,jobs,nodes,reservations,usage,users"


@contextmanager
def private_data(driver: Driver, kinds: str) -> Iterator[None]:
    before = driver.read("/etc/slurm/slurm.conf")
    driver.write("/etc/slurm/slurm.conf", f"{before}\nPrivateData={kinds}\n", user="root", mode="0644")
    driver.run("scontrol", "reconfigure", user="root")
    try:
        yield
    finally:
        driver.write("/etc/slurm/slurm.conf", before, user="root", mode="0644")
        driver.run("scontrol", "reconfigure", user="root")


@pytest.mark.parametrize(
    ("kinds", "gateway"),
    [
        (EVERYTHING, "auto"),
        *(
            pytest.param(*other, marks=pytest.mark.thorough)
            for other in (("jobs", "auto"), ("jobs", "command"), (EVERYTHING, "command"))
        ),
    ],
)
def test_commands_show_own_jobs_and_nothing_of_others(accounted: Driver, kinds: str, gateway: str) -> None:
    with private_data(accounted, kinds), ExitStack() as kept_at_work:
        muri = MuriCluster(accounted)
        muri.configure(gateway=gateway)
        muri.know_profiles()
        for user in ("alice", "bob"):
            kept_at_work.enter_context(muri.training(user=user))
        own = [muri.submit(kind) for kind in ("load", "propagate")]
        others = [muri.submit("load", "--job-name=secret-name", user="bob") for _ in range(2)]
        muri.cycle()
        muri.wait_grouped(*own)
        for user, seen, hidden in (("alice", own, others), ("bob", others, own)):
            shown = muri.driver.run("muri", "queue", "--json", user=user)
            assert shown.stderr == ""
            assert [job["job_id"] for job in json.loads(shown.stdout)["jobs"]] == seen
            texts = [shown.stdout, muri.driver.run("muri", "queue", user=user).stdout]
            for command in ("explain", "preempt"):
                refused = muri.driver.run("muri", command, str(hidden[0]), user=user, check=False)
                assert refused.returncode == 2
                assert "Traceback" not in refused.stderr
                texts.append(refused.stderr.replace(f"job {hidden[0]}", ""))
            texts.append(muri.driver.run("muri", "explain", str(seen[0]), user=user).stdout)
            top = muri.driver.run("muri", "top", "--once", user=user, check=False)
            assert "Traceback" not in top.stderr
            if user == "alice":
                assert "secret-name" not in "".join((*texts, top.stdout))
            told = re.compile(rf"\bjobs? (\d+, )*({'|'.join(map(str, hidden))})\b")
            assert not [text for text in texts if told.search(text)]
            taken = muri.driver.run("muri", "plan", "--save", "-", user=user, check=False)
            assert "Traceback" not in taken.stderr
            if taken.returncode == 0:
                assert {job["job_id"] for job in json.loads(taken.stdout)["jobs"]}.isdisjoint(hidden)
        everything = json.loads(muri.driver.run("muri", "queue", "--json", user="root").stdout)
        assert {job["job_id"] for job in everything["jobs"]} == {*own, *others}
        muri.driver.cancel_all()
