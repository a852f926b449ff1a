"""What root notes about jobs on a node: nothing prepared by others is followed or believed."""

import fcntl
import os
import stat
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(scope="session")
def try_node(build: Callable[..., Path]) -> Path:
    return build("try_node", "node")


@pytest.fixture
def run(try_node: Path, tmp_path: Path) -> Run:
    def call(*words: str, node: str = "n1") -> "subprocess.CompletedProcess[str]":
        command = [try_node, tmp_path, node, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, umask=0o077)

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "muri/node/n1"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_job_is_written_and_read(run: Run, place: Path) -> None:
    assert run("write-job", "7", "1000", "0,3").returncode == 0
    assert (place / "job-7").read_text() == "uid=1000\ngpus=0,3\n"
    assert run("read-job", "7").stdout == "7 1000 0,3\n"
    assert [mode(place), mode(place.parent), mode(place.parent.parent)] == [0o755] * 3
    assert run("remove-job", "7").returncode == run("remove-job", "7").returncode == 0
    assert "No such file" in run("read-job", "7").stderr


def test_a_grant_is_written_read_and_found_by_its_pilot(run: Run, place: Path) -> None:
    for job, pilot, gate, cgroup in (
        ("8", "7", "hold", ""),
        ("9", "7", "license", "/sys/x/job_9"),
        ("10", "6", "hold", ""),
    ):
        assert run("write-grant", job, pilot, "1000", "2", gate, cgroup).returncode == 0
    assert (place / "grant-9").read_text() == "pilot=7\nuid=1000\nrun=2\ngate=license\ncgroup=/sys/x/job_9\n"
    assert run("read-grant", "9").stdout == "9 7 1000 2 license /sys/x/job_9\n"
    assert run("read-grant", "8").stdout == "8 7 1000 2 hold \n"
    (place / "grant-x").write_text("pilot=7\n")
    assert sorted(run("grants", "7").stdout.split()) == ["8", "9"]
    (place / "places-9").write_text("")
    run("remove-grant", "9")
    assert run("grants", "7").stdout.split() == ["8"]
    assert not (place / "places-9").exists()


def test_steps_take_gpus_that_no_other_step_has(try_node: Path, tmp_path: Path, place: Path) -> None:
    with ExitStack() as stack:

        def take(job: str, count: str) -> tuple["subprocess.Popen[str]", str]:
            command = [try_node, tmp_path, "n1", "take", job, "4", count]
            step = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(step)
            assert step.stdout is not None
            return step, step.stdout.readline().strip()

        (first, _), *others = [take("9", count) for count in ("1", "2", "1")]
        assert [first_place for _, first_place in others] == ["1", "3"]
        assert [take("9", count)[1] for count in ("1", "5")] == ["none", "none"]
        assert take("8", "4")[1] == "0"
        first.kill()
        first.wait()
        assert [take("9", count)[1] for count in ("2", "1")] == ["none", "0"]
    assert [mode(place / name) for name in ("places-8", "places-9")] == [0o600, 0o600]


def test_unknown_keys_are_left_alone(run: Run, place: Path) -> None:
    run("write-job", "7", "1000", "0")
    (place / "job-7").write_text("later=x\nuid=1\ngpus=2\nmore=\n")
    assert run("read-job", "7").stdout == "7 1 2\n"


@pytest.mark.parametrize(
    "text",
    ["", "uid=1\n", "uid=1\ngpus=0", "uid=-1\ngpus=0\n", "uid=1 \ngpus=0\n", "uid=4294967296\ngpus=0\n",
     "uid=1\ngpus=" + "0," * 512 + "\n", "uid=1\ngpus=0\0\n", "x" * 100_000 + "\nuid=1\ngpus=0\n"],
    ids=["empty", "short", "no-end", "sign", "space", "large", "long-list", "nul", "long"],
)  # fmt: skip
def test_a_broken_file_is_refused(run: Run, place: Path, text: str) -> None:
    run("write-job", "7", "1000", "0")
    (place / "job-7").write_text(text)
    refused = run("read-job", "7")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "Invalid argument" in refused.stderr


def test_a_line_end_in_a_value_is_refused(run: Run) -> None:
    assert run("write-job", "7", "1000", "0\nuid=0").returncode == 1
    assert run("write-grant", "8", "7", "1000", "0", "hold", "/a\npilot=1").returncode == 1


@pytest.mark.parametrize("name", ["job-7", ".new", "lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "directory", "fifo"])
def test_nothing_prepared_is_followed(run: Run, place: Path, tmp_path: Path, name: str, kind: str) -> None:
    run("read-job", "1")
    precious = tmp_path / "precious"
    precious.write_text("uid=0\ngpus=0\n")
    match kind:
        case "link":
            (place / name).symlink_to(precious)
        case "dangling":
            (place / name).symlink_to(tmp_path / "absent")
        case "directory":
            (place / name).mkdir()
        case "fifo":
            os.mkfifo(place / name)
    if name == "job-7":
        assert run("read-job", "7").returncode == 1
    run("write-job", "7", "1000", "5")
    assert precious.read_text() == "uid=0\ngpus=0\n"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("where", ["muri", "muri/node", "muri/node/n1"])
def test_a_directory_that_is_a_link_is_not_used(run: Run, tmp_path: Path, where: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / where).symlink_to(tmp_path / "elsewhere")
    refused = run("write-job", "7", "1000", "0")
    assert refused.returncode == 1
    assert "cannot use the directory" in refused.stderr
    assert not any((tmp_path / "elsewhere").iterdir())


@as_root
@pytest.mark.parametrize("where", ["muri", "muri/node", "muri/node/n1"])
def test_a_directory_of_another_user_is_not_used(run: Run, tmp_path: Path, where: str) -> None:
    (tmp_path / where).mkdir(parents=True)
    os.chown(tmp_path / where, 4712, 4712)
    assert "belongs to another user" in run("write-job", "7", "1000", "0").stderr


@as_root
def test_a_file_of_another_user_is_not_believed(run: Run, place: Path) -> None:
    run("write-job", "7", "1000", "0")
    os.chown(place / "job-7", 4712, 4712)
    assert "not permitted" in run("read-job", "7").stderr
    assert run("write-job", "7", "1000", "0").returncode == 0
    assert (place / "job-7").stat().st_uid == 0


@pytest.mark.parametrize("node", ["", ".", "..", "../..", "a/b", "x" * 300])
def test_a_name_that_is_no_node_is_refused(run: Run, tmp_path: Path, node: str) -> None:
    assert "has not said the node's name" in run("read-job", "7", node=node).stderr
    assert not any(tmp_path.iterdir())


def test_nodes_on_one_machine_have_rooms_of_their_own(run: Run) -> None:
    run("write-job", "7", "1000", "0", node="n1")
    assert run("read-job", "7", node="n2").returncode == 1


def test_nobody_waits_for_ever_for_the_lock(build: Callable[..., Path], tmp_path: Path) -> None:
    program = build("try_node", "node", define="LOCK_MS=50")
    pipe = subprocess.PIPE
    with subprocess.Popen([program, tmp_path, "n1", "hold"], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        other = subprocess.run([program, tmp_path, "n1", "hold"], stdin=subprocess.DEVNULL, stdout=pipe, text=True,
                               check=False, timeout=60)  # fmt: skip
        assert other.stdout == "none\n"
        holder.kill()


def test_the_lock_is_held_until_its_holder_ends(try_node: Path, tmp_path: Path, place: Path) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([try_node, tmp_path, "n1", "hold"], stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        with (place / "lock").open() as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder.kill()
            fcntl.flock(lock, fcntl.LOCK_EX)
