"""The parts of a grant that need no Slurm: its words, GPUs and variables, a task's cgroup, the program for devices."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from option_sources import SPANK_SOURCE

Run = Callable[..., list[str]]


@pytest.fixture(scope="session")
def try_grant(build: Callable[..., Path]) -> Run:
    program = build("try_grant", "grant", "devices", "node")

    def call(*words: object) -> list[str]:
        command = [program, *(os.fsencode(str(word)) for word in words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return call


@pytest.mark.parametrize(
    ("comment", "said"),
    [
        ("", "none 0 hold"),
        ("muri-grant:7", "granted 7 hold"),
        ("  site=x\tmuri-grant:7\nmuri-gate:licence more", "granted 7 license"),
        ("muri-gate:license muri-grant:4294967295", "granted 4294967295 license"),
        ("xmuri-grant:7 muri-grants:7 grant:7 muri:grant:7", "none 0 hold"),
        ("muri-gate:hold muri-gate:licence", "none 0 hold"),
        *((word, "unclear 0 hold") for word in (
            "muri-grant:", "muri-grant:0", "muri-grant:-7", "muri-grant:+7", "muri-grant:7x", "muri-grant:7,8",
            "muri-grant:4294967296", "muri-grant:00000000000000007", "muri-grant:7 muri-grant:8",
            "muri-grant:7 muri-grant:7",
        )),
    ],
)  # fmt: skip
def test_the_words_of_an_admin_comment(try_grant: Run, comment: str, said: str) -> None:
    assert try_grant("comment", comment) == [said]


@pytest.mark.parametrize(
    ("text", "read"),
    [("0", "0"), ("0,1,3", "0 1 3"), ("3,0", "3 0"), ("99999", "99999"), (",".join(map(str, range(256))), None),
     *((text, "refused") for text in
       ("", ",", "0,", ",0", "0,,1", "0-3", "0, 1", "-1", "1,1", "x", "100000", ",".join(map(str, range(257)))))],
)  # fmt: skip
def test_the_numbers_of_gpus(try_grant: Run, text: str, read: str | None) -> None:
    assert try_grant("gpus", text) == [text.replace(",", " ") if read is None else read]


@pytest.mark.parametrize(
    ("count", "asked", "task", "part"),
    [(4, "", 0, "0 4"), (4, "", 9, "0 4"), (4, "per-task:1", 3, "3 1"), (4, "per-task:2", 1, "2 2"),
     (4, "per-task:4", 0, "0 4"), (4, "per-task:1", 4, "refused"), (4, "per-task:3", 1, "refused"),
     (4, "per-task:4294967295", 4294967295, "refused"), (0, "", 0, "refused"),
     # A user's own words narrow a step or do nothing.
     (4, "per-task:0", 1, "0 4"), (4, "per-task:x", 1, "0 4"), (4, "all", 1, "0 4"), (4, "per-task:-1", 0, "0 4")],
)  # fmt: skip
def test_a_task_has_its_own_part(try_grant: Run, count: int, asked: str, task: int, part: str) -> None:
    assert try_grant("part", count, asked, task) == [part]


def test_lists_for_variables(try_grant: Run) -> None:
    assert try_grant("numbers", "2,3,5", 1, 2) == ["3,5"]
    assert try_grant("numbers", "places", 1, 2) == ["1,2"]
    assert try_grant("numbers", "2,3,5", 2, 2) == try_grant("numbers", "2,3", 0, 0) == ["refused"]
    assert try_grant("numbers", ",".join(map(str, range(100, 200))), 0, 100) == ["refused"]  # no room for it
    assert try_grant("words", "MIG-a,MIG-b,MIG-c", 1, 2) == ["MIG-b,MIG-c"]
    assert try_grant("words", "MIG-a", 1, 1) == try_grant("words", "MIG-a,,b", 0, 3) == ["refused"]


MOUNTS = r"""
22 1 0:21 / /proc rw - proc proc rw
30 22 0:26 / /sys/fs/cgroup/devices rw,nosuid shared:9 master:1 - cgroup cgroup rw,devices
31 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
32 22 0:28 /machine/n1 /other rw - cgroup cgroup rw,devices
33 22 0:29 / /sys/fs/cgroup\040two rw - cgroup2 none rw
34 22 0:30 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
""".lstrip()


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            "4:devices:/slurm/uid_1/job_7/step_batch/task_0\n0::/\n",
            ["v1 /slurm/uid_1/job_7 /step_batch/task_0", "/sys/fs/cgroup/devices/slurm/uid_1/job_7/step_batch/task_0"],
        ),
        (
            "4:devices:/\n0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1\n",
            [
                "v2 /system.slice/slurmstepd.scope/job_7 /step_0/user/task_1",
                "/sys/fs/cgroup two/system.slice/slurmstepd.scope/job_7/step_0/user/task_1",
            ],
        ),
        (
            "0::/x/s3S9M8M911KB00/step_0/user/task_0\n",
            ["v2 /x/s3S9M8M911KB00 /step_0/user/task_0", "/sys/fs/cgroup two/x/s3S9M8M911KB00/step_0/user/task_0"],
        ),
        (
            "9:devices:/machine/n1/slurm/job_7/step_0/task_0\n",
            [
                "v1 /machine/n1/slurm/job_7 /step_0/task_0",
                "/sys/fs/cgroup/devices/machine/n1/slurm/job_7/step_0/task_0",
                "/other/slurm/job_7/step_0/task_0",
            ],
        ),
        (
            "3:freezer:/slurm/job_7/step_0\n4:devices:/user.slice\n",
            ["other /slurm/job_7 /step_0", "/sys/fs/cgroup/freezer/slurm/job_7/step_0"],
        ),
        *((lines, ["none"]) for lines in (
            "", "\n", "4:devices\n", "4:devices:/slurm/job_8/step_0/task_0\n",
            "4:devices:/slurm/job_77/step_0/task_0\n",
            "4:devices:/slurm/xjob_7/step_0/task_0\n", "4:devices:/slurm/job_7\n", "0::/job_7/other/step_0\n",
            "0::/job_7/step_0",  # cut off
        )),
    ],
)  # fmt: skip
def test_where_a_tasks_cgroup_is(try_grant: Run, lines: str, found: list[str]) -> None:
    assert try_grant("cgroup", 7, lines, MOUNTS) == found


def test_a_cgroup_that_cannot_be_read_is_not_taken_for_none(try_grant: Run) -> None:
    assert try_grant("find", 7, os.getpid()) == ["none"]
    assert try_grant("find", 7, 2**31 - 1) == ["unclear"]  # no such process


def test_the_program_refuses_the_closed_devices_alone(try_grant: Run) -> None:
    closed, others = ("c195:1", "c195:2", "b259:3", "c4095:1048575"), ("c195:0", "b195:1", "c259:3", "c1:3", "c195:255")
    answers = try_grant("program", *closed, "--", *closed, *others)
    assert answers == [f"{device} 0" for device in closed] + [f"{device} 1" for device in others]
    assert try_grant("program", "--", "c195:1") == ["c195:1 1"]
    many = [f"c195:{minor}" for minor in range(512)]
    assert try_grant("program", *many, "--", "c195:511", "c195:512") == ["c195:511 0", "c195:512 1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make devices")
def test_devices_are_found_in_order_and_once_and_links_are_not_followed(try_grant: Run, tmp_path: Path) -> None:
    inner = tmp_path / "dev/nvidia-caps"
    inner.mkdir(parents=True)
    for path, kind, major, minor in (
        (inner / "nvidia-cap21", stat.S_IFCHR, 238, 21), (inner / "nvidia-cap3", stat.S_IFCHR, 238, 3),
        (inner.parent / "nvidia10", stat.S_IFCHR, 195, 10), (inner.parent / "nvidia2", stat.S_IFCHR, 195, 2),
        (inner.parent / "same", stat.S_IFCHR, 195, 2), (inner.parent / "disk", stat.S_IFBLK, 8, 1),
        (tmp_path / "outside", stat.S_IFCHR, 1, 3),
    ):  # fmt: skip
        os.mknod(path, kind, os.makedev(major, minor))
    (inner / "file").touch()
    shared = inner.parent / "shm"
    shared.mkdir()
    shared.chmod(0o1777)
    os.mknod(shared / "users", stat.S_IFCHR, os.makedev(195, 99))
    (inner.parent / "link").symlink_to("../outside")
    (inner.parent / "loop").symlink_to(".")
    assert try_grant("devices", inner.parent) == ["b8:1", "c195:2", "c195:10", "c238:3", "c238:21"]
    assert try_grant("devices", tmp_path / "absent") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_what_a_user_mounted_in_the_jobs_namespace_hides_nothing(try_grant: Run, tmp_path: Path) -> None:
    os.mknod(tmp_path / "nvidia0", stat.S_IFCHR, os.makedev(195, 0))
    assert try_grant("within", tmp_path) == ["0", "1"]


@pytest.mark.parametrize("seed", range(4))
def test_made_texts_break_no_parser(try_grant: Run, seed: int) -> None:
    assert try_grant("fuzz", seed, 20_000) == []


@pytest.mark.parametrize("name", ["node", "grant", "devices", "processes", "end"])
def test_the_compilers_analyzer_finds_nothing(name: str) -> None:
    flags = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-fanalyzer", "-Wall", "-Wextra", "-Werror"]
    command = ["gcc", *flags, "-c", SPANK_SOURCE / f"{name}.c", "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
