"""The sandbox's pure parts: configuration, plans, names, locks."""

import json
import multiprocessing
import os
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest

from sandbox import builds, cli, cluster, host, instance, lifecycle, namespace
from sandbox.builds import Build, Pyslurm
from sandbox.cluster import SUITES, Partition, Shape, suite_named
from sandbox.daemons import NodeState, parse_nodes, waiting_for
from sandbox.driver import parse_job
from sandbox.init import Bind, Plan, TextFile, target_in
from sandbox.support import InstancePaths, NotRunningError, Progress, UsageError, locked_directory


def lines_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


def test_slurm_conf_names_every_node_on_its_own_port() -> None:
    text = cluster.slurm_files(Shape(nodes=3, gpus_per_node=2), SUITES["forky"], "x")["/etc/slurm/slurm.conf"]
    nodes = lines_of(text, "NodeName=")
    assert [line.split()[0] for line in nodes] == ["NodeName=n1", "NodeName=n2", "NodeName=n3"]
    assert len({line.split()[2] for line in nodes}) == 3
    assert all("Gres=gpu:2" in line for line in nodes)
    assert "$" not in text


@pytest.mark.parametrize("shape", [Shape(cloud_nodes=2000), Shape(cloud_nodes=2000, accounting=True, site=True)])
def test_nodes_without_a_slurmd_are_a_clouds_and_have_gpus(shape: Shape) -> None:
    files = cluster.slurm_files(shape, SUITES["forky"], "x")
    (cloud,) = lines_of(files["/etc/slurm/slurm.conf"], "NodeName=c")
    gres = lines_of(files["/etc/slurm/gres.conf"], "NodeName=c")
    kind = "gpu:tesla:8" if shape.site else "gpu:8"
    assert cloud.startswith("NodeName=c[1-2000] ")
    assert f" Gres={kind},muri:64 " in cloud
    assert cloud.endswith("State=CLOUD")
    assert [line.split()[1] for line in gres] == ["Name=gpu", "Name=muri"]
    assert not any("File=" in line for line in gres)


def test_without_such_nodes_nodes_are_not_switched_off() -> None:
    files = cluster.slurm_files(Shape(), SUITES["forky"], "x")
    assert "Suspend" not in "".join(files.values())


def test_only_main_is_the_default_partition() -> None:
    shape = Shape(extra_partitions=(Partition("small", "n1"),))
    text = cluster.slurm_files(shape, SUITES["forky"], "x")["/etc/slurm/slurm.conf"]
    main, small = lines_of(text, "PartitionName=")
    assert "Default=YES" in main
    assert "PartitionName=small Nodes=n1 Default=NO" in small


def test_requeued_jobs_start_soon_unless_a_shape_asks_for_slurms_own_wait() -> None:
    for shape, seconds in ((Shape(), 10), (Shape(cred_expire_s=cluster.SLURM_CRED_EXPIRE_S), 120)):
        text = cluster.slurm_files(shape, SUITES["forky"], "x")["/etc/slurm/slurm.conf"]
        assert lines_of(text, "AuthInfo=") == [f"AuthInfo=cred_expire={seconds}"]


@pytest.mark.parametrize(
    ("suite", "auth"), [("forky", "auth/slurm"), ("trixie", "auth/munge"), ("bookworm", "auth/munge")]
)
def test_each_suite_has_its_authentication(suite: str, auth: str) -> None:
    text = cluster.slurm_files(Shape(), SUITES[suite], "x")["/etc/slurm/slurm.conf"]
    assert lines_of(text, "AuthType=") == [f"AuthType={auth}"]


@pytest.mark.parametrize(("gpus", "device"), [(1, "File=/dev/muri-gpu0"), (4, "File=/dev/muri-gpu[0-3]")])
def test_gres_names_as_many_devices_as_the_plan_makes(gpus: int, device: str) -> None:
    shape = Shape(gpus_per_node=gpus)
    assert device in cluster.slurm_files(shape, SUITES["forky"], "x")["/etc/slurm/gres.conf"]
    assert len(shape.device_files) == gpus


@pytest.mark.parametrize("field", ["nodes", "gpus_per_node", "cpus_per_node"])
def test_sizes_out_of_range_are_refused(field: str) -> None:
    sizes: dict[str, Any] = {field: 0}
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} 0 is out of range"):
        Shape(**sizes)


@pytest.mark.parametrize("text", ["small", "small=", "=n1", "a b=n1"])
def test_malformed_partitions_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=NODES"):
        cluster.parse_partition(text)


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-x", "x" * 33])
def test_names_that_are_no_file_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="no valid name"):
        InstancePaths(name)


def test_unknown_suite_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="bookworm, forky, trixie"):
        suite_named("sarge")


def test_recipe_hash_depends_on_the_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SUITES["forky"].recipe_hash
    assert before == SUITES["forky"].recipe_hash
    assert before != SUITES["bookworm"].recipe_hash
    monkeypatch.setenv("MURI_DEBIAN_MIRROR", "http://mirror.invalid/debian")
    assert before != SUITES["forky"].recipe_hash


def test_plan_survives_json() -> None:
    plan = Plan("/l", "/m", (Bind("/a", "/b"),), (TextFile("/f", "text", 0o600),), ("/d",), ("/dev/x",),
                "ctl", True, ("/bin/true",), {"A": "b"}, "/w", 5)  # fmt: skip
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_a_sites_hosts_have_what_is_theirs(tmp_path: Path) -> None:
    shape = Shape(nodes=2, accounting=True, site=True, constrained=True)
    plan = lifecycle.root_plan("x", SUITES["forky"], shape, Build(SUITES["forky"], tmp_path), Pyslurm(tmp_path))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    hosts = {host.hostname: host for host in plan.hosts}
    assert list(hosts) == ["login", "n1", "n2"]
    assert len({plan.mountpoint, *(host.mountpoint for host in plan.hosts)}) == 4
    assert {name: host.cgroup for name, host in hosts.items()} == {
        "login": "", "n1": "muri-sandbox-x/n1", "n2": "muri-sandbox-x/n2"
    }  # fmt: skip
    assert hosts["login"].device_files == ()
    names = {Path(file.path).name for file in hosts["n1"].files}
    assert {"slurm.conf", "gres.conf", "munge.key", "muri.conf"} <= names
    assert names & {"slurm.key", "slurmdbd.conf", "job_submit.lua", "sandbox.cnf"} == set()
    assert {"/home", "/opt/muri/pyslurm"} & {bind.target for bind in hosts["n1"].binds} == {"/home"}


def test_a_sites_slurm_conf() -> None:
    files = cluster.slurm_files(Shape(accounting=True, site=True, constrained=True), SUITES["forky"], "x")
    text = files["/etc/slurm/slurm.conf"]
    for line in ("SlurmUser=slurm", "AuthType=auth/munge", "TaskPlugin=task/cgroup", "GresTypes=gpu,muri"):
        assert line in text.splitlines()
    assert "Gres=gpu:tesla:2,muri:64" in text
    assert "ConstrainDevices=yes" in files["/etc/slurm/cgroup.conf"]


def test_a_bare_site_knows_nothing_of_muri() -> None:
    files = cluster.slurm_files(Shape(accounting=True, site=True, bare=True), SUITES["forky"], "x")
    assert not any("muri" in path for path in files)
    lines = {line for text in files.values() for line in text.splitlines() if not line.startswith(("#", "--"))}
    assert {"GresTypes=gpu", "Licenses=matlab:2"} <= lines
    assert not [line for line in lines if "muri" in line.replace("muri-x", "").replace("/dev/muri-gpu", "")]


@pytest.mark.parametrize(
    ("shape", "match"), [({"site": True}, "a site has accounting"), ({"constrained": True}, "only a site's devices")]
)
def test_parts_of_a_site_are_not_had_alone(shape: dict[str, bool], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Shape(**shape)  # type: ignore[arg-type]


def test_unknown_hosts_are_refused_with_those_there_are() -> None:
    site = instance.Instance(
        "x", "trixie", "24.11.5", 1, 2, 16, 7, 1, "2026-01-01T00:00:00Z", hosts={"login": 8, "n1": 9}
    )
    assert [site.process_of(host) for host in ("ctl", "login", "n1")] == [7, 8, 9]
    with pytest.raises(UsageError, match="no host 'n2': choose one of ctl, login, n1"):
        site.process_of("n2")


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


def test_pyslurm_is_refused_in_one_sentence_for_an_old_slurm(tmp_path: Path) -> None:
    status = tmp_path / "root/var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text("Package: slurmctld\nStatus: install ok installed\nVersion: 22.05.8-4+deb12u3\n\n")
    outcome = builds.ensure_pyslurm(Build(SUITES["bookworm"], tmp_path), Progress())
    assert outcome.directory is None
    assert outcome.reason.startswith("pyslurm 25.11.2 cannot be built for Slurm 22.05.8 (")
    assert "command gateway" in outcome.reason


def test_a_failed_build_of_pyslurm_is_remembered(tmp_path: Path) -> None:
    status = tmp_path / "root/var/lib/dpkg/status"
    status.parent.mkdir(parents=True)
    status.write_text("Package: slurmctld\nVersion: 26.05.5-1\n\n")
    note = tmp_path / f"pyslurm-{builds.PYSLURM_VERSION}-{host.python_tag()}.failed"
    note.touch()
    outcome = builds.ensure_pyslurm(Build(SUITES["forky"], tmp_path), Progress())
    assert outcome.directory is None
    assert f"remove {note} to try again" in outcome.reason


def test_local_paths_of_pip_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index/simple").mkdir(parents=True)
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{tmp_path}/index/simple https://example.invalid/simple")
    targets = {item.target for item in host.pip_binds()}
    assert {str(tmp_path / "wheels"), str(tmp_path / "index")} <= targets
    assert "/" not in targets


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


@pytest.mark.parametrize("text", ["NAME", "=x", ""])
def test_malformed_variables_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="NAME=VALUE"):
        cli._variables([text])


def _hold(directory: Path, held: Event, release: Event) -> None:
    with locked_directory(directory, Progress(), "a test"):
        held.set()
        release.wait(30)
        directory.rmdir()


def test_lock_waits_and_survives_removal_of_the_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    held, release = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "x", held, release))
    holder.start()
    assert held.wait(30)
    release.set()
    with locked_directory(tmp_path / "x", Progress(), "the holder"):
        assert (tmp_path / "x").is_dir()
    holder.join(30)
    assert holder.exitcode == 0
