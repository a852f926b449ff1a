"""Files that the controller trusts: made for it alone, tightened when they are its own, refused otherwise."""

import os
import stat
from pathlib import Path

import pytest

from muri.slurm_plugin.config import ConfigError, require_trusted
from muri.slurm_plugin.controller.loop import LOCK_NAME, only_one
from muri.slurm_plugin.private_files import (
    UnsafeFileError,
    make_private_directory,
    open_private_file,
    why_unsafe,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")

STRANGER = 4711


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("looser", [False, True])
def test_directory_and_file_are_for_one_user_alone_and_keep_their_content(tmp_path: Path, looser: bool) -> None:
    state = tmp_path / "a" / "state"
    if looser:
        state.mkdir(parents=True)
        state.chmod(0o755)
        (state / "journal.db").write_text("rows")
        (state / "journal.db").chmod(0o666)
    make_private_directory(state)
    os.close(open_private_file(state / "journal.db"))
    assert (mode(state), mode(state / "journal.db")) == (0o700, 0o600)
    assert (state / "journal.db").read_text() == ("rows" if looser else "")


def test_a_directory_that_serves_others_too_is_not_closed_to_them(tmp_path: Path) -> None:
    for name, permissions in (("lib", 0o755), ("tmp", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(permissions)
    (tmp_path / "lib" / "slurm").mkdir()
    for name in ("lib", "tmp"):
        before = mode(tmp_path / name)
        with pytest.raises(UnsafeFileError, match="not Muri's alone"):
            make_private_directory(tmp_path / name)
        assert mode(tmp_path / name) == before


@pytest.mark.parametrize("target", ["precious", "absent"])
def test_links_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "precious").mkdir(mode=0o751)
    (tmp_path / "state").symlink_to(tmp_path / target)
    for make in (make_private_directory, open_private_file):
        with pytest.raises(UnsafeFileError, match=r"state is a link"):
            make(tmp_path / "state")
    assert not (tmp_path / "absent").exists()


def test_what_is_no_file_or_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UnsafeFileError, match=r"cannot use .*file: "):
        make_private_directory(tmp_path / "file")
    with pytest.raises(UnsafeFileError, match="not a plain file"):
        open_private_file(tmp_path / "fifo")


@as_root
def test_those_of_another_user_are_refused_and_left_alone(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    (state / LOCK_NAME).write_text("not ours")
    for path in (state / LOCK_NAME, state):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    for make, place in ((make_private_directory, state), (open_private_file, state / LOCK_NAME)):
        with pytest.raises(UnsafeFileError, match=f"belongs to {STRANGER}, not to root"):
            make(place)
    assert mode(state / LOCK_NAME) == 0o777
    assert (state / LOCK_NAME).read_text() == "not ours"


@as_root
def test_a_user_who_may_not_enter_learns_whose_it_is(tmp_path: Path) -> None:
    make_private_directory(tmp_path / "state")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(STRANGER, STRANGER, STRANGER)
            with only_one(tmp_path / "state"):
                pass
        except UnsafeFileError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)  # whatever happened: this process must not go on with the tests
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        assert told.read() == (
            f"{STRANGER} may not use {tmp_path}/state: run this as root, or as the controller's user"
        )


def test_the_lock_is_no_link_and_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    state = tmp_path / "state"
    state.mkdir()
    (state / LOCK_NAME).symlink_to(tmp_path / "precious")
    with pytest.raises(UnsafeFileError, match="is a link"), only_one(state):
        pass
    assert (tmp_path / "precious").read_text() == "precious"
    (state / LOCK_NAME).unlink()
    with only_one(state):
        assert mode(state / LOCK_NAME) == 0o600
        assert (state / LOCK_NAME).read_text() == f"{os.getpid()}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "muri" / "muri.yaml"
    path.parent.mkdir()
    path.write_text("policy: auto\n")
    path.chmod(0o644)
    return path


def test_a_configuration_that_only_its_owner_can_write_or_exchange_is_trusted(config: Path) -> None:
    assert why_unsafe(config) is None
    require_trusted(config)
    require_trusted(None)
    for permissions in (0o664, 0o646):
        config.chmod(permissions)
        with pytest.raises(ConfigError, match=rf"others may write .*muri\.yaml \(mode 0{permissions:o}\)"):
            require_trusted(config)
    config.chmod(0o644)
    config.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write .*/muri \(mode 0777\)"):
        require_trusted(config)
    config.parent.chmod(0o1777)  # as /tmp: there they cannot
    require_trusted(config)


def test_each_link_on_the_way_counts_and_where_it_ends(config: Path, tmp_path: Path) -> None:
    outer, between = tmp_path / "etc", tmp_path / "shared"
    outer.mkdir()
    between.mkdir()
    (between / "current").symlink_to(config)
    (outer / "muri.yaml").symlink_to("../shared/current")
    (outer / "folder").symlink_to(between)
    places = (outer / "muri.yaml", outer / "folder" / "current")
    assert [why_unsafe(place) for place in places] == [None, None]
    for folder in (outer, between, config.parent):
        folder.chmod(0o777)
        assert all("others may write" in (why_unsafe(place) or "") for place in places)
        folder.chmod(0o755)


def test_one_that_is_not_there_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for name, why in (("a", "Too many levels of symbolic links"), ("absent.yaml", "No such file")):
        with pytest.raises(ConfigError, match=rf"cannot read the configuration .*: {why}"):
            require_trusted(tmp_path / name)


@as_root
def test_one_of_another_user_or_a_link_of_his_is_refused(config: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.yaml"
    link.symlink_to(config)
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    assert why_unsafe(link) == f"{link} belongs to {STRANGER}"
    os.chown(config, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match=f"muri.yaml belongs to {STRANGER}"):
        require_trusted(config)
