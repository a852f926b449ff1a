"""The sandbox's pure parts: configuration, plans, names, locks."""

import json
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from unittest.mock import Mock

import pytest

from sandbox import builds, cli, cluster, instance, lifecycle, namespace
from sandbox.builds import Build, Pyslurm
from sandbox.cluster import SUITES, Shape
from sandbox.daemons import NodeState, parse_nodes, waiting_for
from sandbox.driver import CommandError, Driver, parse_job
from sandbox.init import Plan, target_in
from sandbox.support import InstancePaths, NotRunningError, Progress, UsageError, locked_directory

SITE = instance.Instance("x", "trixie", "24.11.5", 1, 2, 16, 7, 1, "2026-01-01T00:00:00Z", hosts={"login": 8, "n1": 9})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Shape(nodes=0), "--nodes 0 is out of range"),
        (lambda: Shape(site=True), "a site has accounting"),
        (lambda: Shape(constrained="v2"), "only a site's devices"),
        (lambda: cluster.parse_partition("small="), "NAME=NODES"),
        (lambda: cluster.parse_partition("small=n1:0"), "small=n.1-2.:1"),
        (lambda: cli._variables(["=x"]), "NAME=VALUE"),
        (lambda: InstancePaths("../x"), "not a valid name"),
        (lambda: SITE.process_of("n2"), "no host 'n2': choose one of ctl, login, n1"),
    ],
)
def test_mistakes_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


@pytest.mark.parametrize(("version", "hierarchies"), [("v1", ("devices", "freezer")), ("v2", ("unified",))])
def test_a_sites_hosts_have_what_is_theirs(tmp_path: Path, version: str, hierarchies: tuple[str, ...]) -> None:
    shape = Shape(nodes=2, accounting=True, site=True, constrained=version)
    plan = lifecycle.root_plan("x", SUITES["forky"], shape, Build(SUITES["forky"], tmp_path), Pyslurm(tmp_path))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    hosts = {host.hostname: host for host in plan.hosts}
    assert list(hosts) == ["login", "n1", "n2"]
    assert len({plan.mountpoint, *(host.mountpoint for host in plan.hosts)}) == 4
    assert {name: host.cgroup for name, host in hosts.items()} == {
        "login": "", "n1": "muri-sandbox-x/n1", "n2": "muri-sandbox-x/n2"
    }  # fmt: skip
    assert {name: host.hierarchies for name, host in hosts.items()} == {
        "login": (), "n1": hierarchies, "n2": hierarchies
    }  # fmt: skip
    assert (hosts["login"].device_files, plan.hierarchies) == ((), ())
    (cgroup_conf,) = (file.text for file in hosts["n1"].files if file.path == "/etc/slurm/cgroup.conf")
    assert f"CgroupPlugin=cgroup/{version}\nConstrainDevices=yes\n" in cgroup_conf
    names = {Path(file.path).name for file in hosts["n1"].files}
    assert {"slurm.conf", "gres.conf", "munge.key", "muri.conf", "cli_filter.lua"} <= names
    assert names & {"slurm.key", "slurmdbd.conf", "job_submit.lua", "sandbox.cnf"} == set()
    assert {"/home", "/opt/muri/pyslurm"} & {bind.target for bind in hosts["n1"].binds} == {"/home"}


@pytest.mark.parametrize(
    ("text", "nodes", "oversubscribe"),
    [("small=n[1-2]", "n[1-2]", "YES:8"), ("small=n1,n3:2", "n1,n3", "YES:2"), ("small=n1:1", "n1", "NO")],
)
def test_a_partition_says_how_many_jobs_may_share_a_cpu(text: str, nodes: str, oversubscribe: str) -> None:
    shape = cluster.with_partitions(Shape(), [text])
    lines = cluster.slurm_files(shape, SUITES["forky"], "x")["/etc/slurm/slurm.conf"].splitlines()
    partitions = [line.split() for line in lines if line.startswith("PartitionName=")]
    assert [{"PartitionName=main", "OverSubscribe=YES:8"} <= set(words) for words in partitions] == [True, False]
    assert {"PartitionName=small", f"Nodes={nodes}", f"OverSubscribe={oversubscribe}"} <= set(partitions[1])


def test_a_bare_site_knows_nothing_of_muri() -> None:
    files = cluster.slurm_files(Shape(accounting=True, site=True, bare=True), SUITES["forky"], "x")
    assert not any("muri" in path for path in files)
    lines = {line for text in files.values() for line in text.splitlines() if not line.startswith(("#", "--"))}
    assert {"GresTypes=gpu", "Licenses=matlab:2"} <= lines
    assert not [line for line in lines if "muri" in line.replace("muri-x", "").replace("/dev/muri-gpu", "")]


def test_targets_that_leave_the_root_are_refused(tmp_path: Path) -> None:
    (tmp_path / "var").symlink_to("/etc")
    with pytest.raises(OSError, match="symbolic link"):
        target_in(tmp_path, Path("/var/passwd"))
    assert target_in(tmp_path, Path("/usr/x")) == tmp_path / "usr/x"


def test_job_fields_keep_values_with_spaces() -> None:
    text = (
        "JobId=7 JobName=a b\n   JobState=PENDING Reason=JobHeldUser Dependency=(null)\n"
        "   Command=/x y.sh\n   ExitCode=3:0\n   MinMemoryCPU=2000M\n   Comment=one two\n"
    )
    fields = parse_job(text)
    assert fields["JobName"] == "a b"
    assert fields["Reason"] == "JobHeldUser"
    assert (fields["Command"], fields["ExitCode"], fields["Comment"]) == ("/x y.sh", "3:0", "one two")


@pytest.mark.parametrize(("error", "looks"), [("", 1), ("Socket timed out on send/recv", 4), ("Unknown key", 0)])
def test_slurms_answer_to_a_new_configuration_may_come_after_scontrols_patience(
    monkeypatch: pytest.MonkeyPatch, error: str, looks: int
) -> None:
    starts = iter(["10", "10", "10", "12"])
    said = []

    def run(_driver: Driver, *command: str, **_options: str) -> Mock:
        if "reconfigure" in command:
            if error:
                raise CommandError(error)
            return Mock()
        said.append(f"Configuration data\nBOOT_TIME               = {next(starts)}\nVERSION = 24.11\n")
        return Mock(stdout=said[-1])

    monkeypatch.setattr(Driver, "run", run)
    driver = Driver(Mock())
    if looks:
        driver.reconfigure()
        assert len(said) == looks
    else:
        with pytest.raises(CommandError, match="Unknown key"):
            driver.reconfigure()


def test_pyslurm_is_refused_in_one_sentence_for_an_old_slurm(tmp_path: Path) -> None:
    header = tmp_path / "root/usr/include/slurm/slurm_version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define SLURM_VERSION_NUMBER 0x160508\n")
    outcome = builds.ensure_pyslurm(Build(SUITES["bookworm"], tmp_path), Progress())
    assert outcome.directory is None
    assert outcome.reason.startswith("pyslurm 25.11.2 cannot be built for Slurm 22.05.8 (")
    assert "command gateway" in outcome.reason


@pytest.mark.parametrize(("number", "flagged"), [("0x190b07", False), ("0x1a0500", True), ("0x1a0b02", True)])
def test_pyslurm_gets_the_names_that_slurm_has_dropped_and_no_others(number: str, flagged: bool) -> None:
    script = builds.pyslurm_script(f"#define _SLURM_VERSION_H_\n#define SLURM_VERSION_NUMBER {number}\n")
    assert ("ESLURM_ERROR_ON_DESC_TO_RECORD_COPY=2065" in script) is flagged
    assert ('CFLAGS="-O1 -w"' in script) is not flagged


def test_a_process_that_reuses_an_id_is_not_the_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MURI_CACHE", str(tmp_path))
    ticks = namespace.start_ticks(os.getpid())
    assert ticks is not None
    stale = instance.Instance("x", "forky", "26.05.5", 4, 2, 16, os.getpid(), ticks - 1, "2026-01-01T00:00:00Z")
    InstancePaths("x").directory.mkdir(parents=True)
    stale.save()
    assert instance.load("x") == stale
    with pytest.raises(NotRunningError, match="muri-sandbox up --name x"):
        instance.require("x")


def test_nodes_are_read_with_reasons_that_hold_separators() -> None:
    nodes = parse_nodes("n1|idle|none\nn2|down*|Not responding | since noon\nslurm_load: error\n")
    assert nodes == {
        "n1": NodeState("n1", "idle"),
        "n2": NodeState("n2", "down*", "Not responding | since noon"),
    }


def test_nodes_that_are_down_silent_or_left_out_are_waited_for() -> None:
    nodes = parse_nodes("n1|mixed|none\nn2|idle*|none\nn3|down|broken\n")
    missing = waiting_for(("n1", "n2", "n3", "n4"), nodes)
    assert [str(node) for node in missing] == ["n2 is idle*", "n3 is down (broken)", "n4 is unknown"]


def _hold(directory: Path, held: Event, release: Event) -> None:
    with locked_directory(directory, Progress(), "a test"):
        held.set()
        release.wait(240)
        directory.rmdir()


def test_lock_waits_and_survives_removal_of_the_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "x", held, release))
    holder.start()
    assert held.wait(240)
    release.set()
    with locked_directory(tmp_path / "x", Progress(), "the holder"):
        assert (tmp_path / "x").is_dir()
    holder.join(240)
    assert holder.exitcode == 0
