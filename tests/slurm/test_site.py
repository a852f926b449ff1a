"""A sandbox that looks like a site, on every release: its hosts, its rules, its constrained devices."""

import os
import platform
import re
from dataclasses import replace
from pathlib import Path

import pytest
from accounting_records import Payer, complete_records
from devices import opened_by_step, opener
from sandboxes import SITE, on_constrained_sites

from sandbox import cgroups, lifecycle
from sandbox.cluster import SUITES
from sandbox.driver import CommandError, Driver
from sandbox.init import HIERARCHIES
from sandbox.releases import PROBES, SAME_SECOND, examine
from sandbox.releases_page import PAGE, releases_on
from sandbox.support import InstancePaths, Progress, StartError

#: An unprivileged job that tells where it runs.
WHERE = "--wrap=hostname"


def exists(driver: Driver, path: str, on: str) -> bool:
    return driver.run("test", "-e", path, user="root", on=on, check=False).returncode == 0


def test_each_host_has_its_name_and_its_own_files_but_home_is_shared(site: Driver) -> None:
    hosts = ("ctl", "login", "n1", "n2", "n3")
    assert site.instance.host_names == hosts
    for host in hosts:
        assert site.run("hostname", on=host).stdout == f"{host}\n"
        site.write("/tmp/mine", host, on=host)
        site.write(f"seen-{host}", host, on=host)
    for host in hosts:
        assert site.read("/tmp/mine", on=host) == host
        assert [site.read(f"/home/alice/seen-{other}", on=host) for other in hosts] == list(hosts)
    assert exists(site, "/var/spool/slurmctld/job_state", "ctl") or exists(
        site, "/var/spool/slurmctld/clustername", "ctl"
    )
    # /run/muri is not among them: the SPANK plugin makes it on each node where a job has run.
    foreign = ("/var/lib/muri", "/etc/muri", "/opt/muri/pyslurm", "/opt/muri/job_submit",
               "/var/spool/slurmctld/clustername", "/etc/slurm/slurmdbd.conf", "/etc/slurm/job_submit.lua")  # fmt: skip
    assert [(host, path) for host in ("login", "n1") for path in foreign if exists(site, path, host)] == []


def test_daemons_run_as_on_a_site(site: Driver) -> None:
    lines = site.run("ps", "-A", "-o", "user=,comm=", user="root").stdout.splitlines()
    # `scontrol reconfigure` starts daemons anew under the names of Debian's files.
    running = {tuple(line.removesuffix("-wlm").split()[:2]) for line in lines}
    assert {("slurm", "slurmctld"), ("slurm", "slurmdbd"), ("root", "slurmd"), ("munge", "munged")} <= running
    config = site.run("scontrol", "show", "config", on="login").stdout
    assert "auth/munge" in config
    assert "slurm(" in next(line for line in config.splitlines() if line.startswith("SlurmUser"))
    job = site.submit("--hold", "--comment=kept", WHERE, on="login")
    site.restart_controller()
    assert site.job(job)["Comment"] == "kept"


def test_jobs_are_billed_and_bound_by_partition_feature_and_reservation(site: Driver) -> None:
    billed = site.submit("--gres=gpu:tesla:1", "--account=astro", "--qos=short", "--time=5", "--wrap=true", on="login")
    typed = site.submit("--constraint=v100", "--reservation=course", "--output=on.out", WHERE, on="n1")
    (record,) = complete_records(site, billed)
    assert (record.payer, record.gpus) == (Payer("astro", "short"), 1)
    assert site.wait_state(typed)["JobState"] == "COMPLETED"
    assert site.read("/home/alice/on.out") == "n3\n"
    unreserved = site.submit("--nodelist=n3", WHERE, on="login")
    long = site.submit("--partition=debug", "--time=61", WHERE, on="login")
    site.wait_until(lambda: "reserved" in site.job(unreserved)["Reason"].lower(), "the wait for the reserved node")
    site.wait_until(lambda: site.job(long)["Reason"] == "PartitionTimeLimit", "the partition's limit")


def test_the_sites_own_job_submit_rules_beside_muris(site: Driver) -> None:
    with pytest.raises(CommandError, match="site: a job in the partition debug has one node"):
        site.submit("--partition=debug", "--nodes=2", WHERE, on="login")
    job = site.submit("--hold", "--muri", "--gres=gpu:1", WHERE, on="login")
    fields = site.job(job)
    assert fields["TimeLimit"] == "00:30:00"
    assert fields["AdminComment"].startswith("muri:on")


def test_the_sites_own_cli_filter_rules_beside_muris(site: Driver) -> None:
    member = {"MURI_PILOT": "1", "SLURM_JOB_ID": "999", "SLURM_JOB_GPUS": "0"}
    said_of = {"forbidden": "site: no step has this name", "allowed": "muri: the step asks for more GPUs"}
    for host in ("login", "n1"):
        for name, said in said_of.items():
            with pytest.raises(CommandError, match=said):
                site.run("srun", f"--job-name={name}", "--gpus=2", "true", env=member, on=host)


@on_constrained_sites(*SUITES)
def test_a_job_opens_the_gpus_that_it_was_given_and_no_others(site: Driver) -> None:
    gpus = ["/dev/muri-gpu0", "/dev/muri-gpu1"]
    assert len(opened_by_step(site, "--gres=gpu:1")) == 1
    assert opened_by_step(site, "--gres=gpu:2") == gpus
    assert opened_by_step(site) == []
    assert opened_by_step(site, "--gres=muri:1") == []
    opens = opener(site)
    assert site.run(*opens.split(), on="n1").stdout.split() == gpus  # the devices are there and open to all else
    script = f"--wrap={opens} > batch.out; srun --overlap --gres=none {opens} > step.out"
    first = site.submit("--gres=gpu:1", "--nodelist=n1", f"{script}; sleep 600", on="login")
    site.wait_until(lambda: site.read("/home/alice/batch.out") != "", "the first job")
    second = site.submit("--gres=gpu:1", "--nodelist=n1", f"--wrap={opens} > second.out", on="login")
    assert site.wait_state(second)["JobState"] == "COMPLETED"
    assert sorted(site.read(f"/home/alice/{name}.out").strip() for name in ("batch", "second")) == gpus
    assert site.read("/home/alice/step.out") == ""
    assert site.job(first)["JobState"] == "RUNNING"


@pytest.mark.parametrize("version", HIERARCHIES)
def test_a_bare_site_has_nothing_of_muri_and_leaves_no_cgroup(version: str) -> None:
    name = f"bare-{os.getpid()}"
    shape = replace(SITE, nodes=1, bare=True, constrained="" if cgroups.refusal(version) else version)
    started, _ = lifecycle.up(name, SUITES["forky"], shape, Progress())
    groups = [Path("/sys/fs/cgroup", hierarchy, InstancePaths(name).cgroup) for hierarchy in HIERARCHIES[version]]
    try:
        shown = [group for group in groups if group.parent.is_dir()]
        assert [group.exists() for group in shown] == [bool(shape.constrained)] * len(shown)
        bare = Driver(started)
        assert "--muri" not in bare.run("sbatch", "--help", on="login").stdout
        for host in bare.instance.host_names:
            assert bare.run("sh", "-c", "command -v muri", on=host, check=False).returncode != 0
            assert not exists(bare, "/opt/muri", host)
        bare.run("scontrol", "delete", "reservationname=course", user="root")
        job = bare.submit("--gres=gpu:1", "--wrap=sleep 600", on="login")
        bare.wait_state(job, "RUNNING")
    finally:
        lifecycle.down(name, Progress())
    assert [group for group in groups if group.exists()] == []


def test_a_machine_that_cannot_constrain_devices_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/mnt/nosuch" in cgroups.complaint(["nosuch"])
    monkeypatch.setattr(cgroups, "_BPF_CALLS", {})
    assert re.search(r"no cgroups v2 .*bpf: its number on \w+ is not known", cgroups.refusal("v2"))
    monkeypatch.setattr(cgroups, "_BPF_CALLS", {platform.machine(): 100_000})
    assert "bpf: Function not implemented" in cgroups.refusal("v2")
    monkeypatch.setattr(cgroups, "refusal", lambda version: f"no cgroups {version} here")
    name = f"refused-{os.getpid()}"
    with pytest.raises(StartError, match="no cgroups v2 here\nWithout --constrain-devices"):
        lifecycle.up(name, SUITES["forky"], replace(SITE, constrained="v2"), Progress())
    assert not InstancePaths(name).directory.exists()


def test_a_release_can_do_what_the_page_says(site: Driver) -> None:
    columns = releases_on(PAGE.read_text(encoding="utf-8"))
    said = next(column for column in columns if column.suite == site.instance.suite).answers
    questions = [each for each in PROBES if each != SAME_SECOND]
    found = examine(site, Progress(), questions).answers
    assert {each: found[each].works for each in questions} == {each: said[each].works for each in questions}
