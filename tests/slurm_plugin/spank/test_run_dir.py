"""The directory that the SPANK plugin makes as root for a user's jobs."""

import ctypes
import os
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from option_sources import SPANK_SOURCE

USER = 4711 if os.geteuid() == 0 else os.geteuid()

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")

Make = Callable[..., str]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    target = tmp_path_factory.mktemp("run-dir") / "run_dir.so"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wconversion", "-Wformat=2"]
    command = ["cc", "-std=c11", *warnings, "-shared", "-fPIC", "-o", target, SPANK_SOURCE / "run_dir.c"]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(target)).muri_make_run_dir
    function.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p, ctypes.c_size_t]

    def call(parent: Path, uid: int = USER, error_size: int = 256) -> str:
        """Make it; returns "" or the error."""
        error = ctypes.create_string_buffer(error_size)
        code = function(os.fsencode(parent), uid, uid, error, error_size)
        assert (code == 0) is (error.value == b"")
        return error.value.decode()

    return call


def facts(path: Path) -> tuple[int, int]:
    found = path.lstat()
    assert stat.S_ISDIR(found.st_mode)
    return found.st_uid, stat.S_IMODE(found.st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_everybody_may_enter_the_first_and_only_the_user_the_second(make: Make, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert make(tmp_path) == ""
    finally:
        os.umask(before)
    assert facts(tmp_path / "muri") == (os.geteuid(), 0o755)
    assert facts(tmp_path / "muri" / str(USER)) == (USER, 0o700)


def test_jobs_that_start_at_the_same_moment(make: Make, tmp_path: Path) -> None:
    barrier, errors = threading.Barrier(8), []

    def start() -> None:
        barrier.wait()
        errors.append(make(tmp_path))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [""] * 8
    assert facts(tmp_path / "muri" / str(USER)) == (USER, 0o700)


@pytest.mark.parametrize("where", ["muri", f"muri/{USER}"])
@pytest.mark.parametrize("kind", ["link", "dangling", "file", "fifo"])
def test_nothing_prepared_is_followed(make: Make, tmp_path: Path, where: str, kind: str) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o751)
    precious.chmod(0o751)
    place = tmp_path / "run" / where
    place.parent.mkdir(parents=True)
    match kind:
        case "link":
            place.symlink_to(precious)
        case "dangling":
            place.symlink_to(tmp_path / "absent")
        case "file":
            place.touch()
        case "fifo":
            os.mkfifo(place)
    assert "cannot make the run directory" in make(tmp_path / "run")
    assert facts(precious) == (os.geteuid(), 0o751)
    assert not any(precious.iterdir())
    assert not (tmp_path / "absent").exists()


@as_root
@pytest.mark.parametrize("where", ["muri", f"muri/{USER}"])
def test_what_another_user_has_made_is_left_alone(make: Make, tmp_path: Path, where: str) -> None:
    place = tmp_path / where
    place.mkdir(parents=True)
    os.chown(place, 4712, 4712)
    place.chmod(0o777)
    assert "belongs to another user" in make(tmp_path)
    assert facts(place) == (4712, 0o777)


def test_what_its_user_has_opened_is_closed_again(make: Make, tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "muri" / str(USER)).chmod(0o777)
    (tmp_path / "muri").chmod(0o777)
    assert make(tmp_path) == ""
    assert facts(tmp_path / "muri") == (os.geteuid(), 0o755)
    assert facts(tmp_path / "muri" / str(USER)) == (USER, 0o700)


@as_root
def test_one_whose_maker_was_killed_before_it_gave_it_away_is_given_away(make: Make, tmp_path: Path) -> None:
    (tmp_path / "muri" / str(USER)).mkdir(parents=True)
    assert make(tmp_path) == ""
    assert facts(tmp_path / "muri" / str(USER)) == (USER, 0o700)


def test_without_the_parent_it_says_so(make: Make, tmp_path: Path) -> None:
    assert "No such file or directory" in make(tmp_path / "absent")
    assert make(tmp_path / "absent", error_size=8) == "cannot "
