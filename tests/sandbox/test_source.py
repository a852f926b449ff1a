"""Slurm from source: which tree is meant, and which builds of the cache answer to a name."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox import cli
from sandbox.builds import Build, ensure_rootfs
from sandbox.source import built_from_source, find_tree, suite_named
from sandbox.support import Progress, UsageError, builds_dir

META = "  Meta:\t\t1\n  Name:\t\tslurm\n  Version:\t{version}\n  Release:\t{release}\n"


def git(directory: Path, *command: str) -> str:
    identity = ("-c", "user.name=alice", "-c", "user.email=alice@example.org")
    return subprocess.run(
        ["git", "-C", str(directory), *identity, *command], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    directory = tmp_path / "slurm"
    directory.mkdir()
    git(directory, "init", "--quiet")
    for version, release in (("25.05.8", "1"), ("25.11.7", "1"), ("26.11.0", "0rc1")):
        (directory / "META").write_text(META.format(version=version, release=release))
        git(directory, "add", "META")
        git(directory, "commit", "--quiet", "-m", version)
        git(directory, "tag", f"slurm-{version.replace('.', '-')}-{release}")
    return directory


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MURI_CACHE", str(tmp_path / "cache"))
    for name in ("source-25.11.7-aa", "source-25.11.10-bb", "source-26.11.0-rc1-cc", "source-24.05.8-dd", "source-ee"):
        (builds_dir() / name).mkdir(parents=True)
        if "24.05" not in name:
            (builds_dir() / name / "complete").touch()
    return builds_dir()


def test_a_repository_has_every_release_and_a_tree_has_one(repository: Path, tmp_path: Path) -> None:
    tagged = find_tree(repository, "slurm-25-11-7-1")
    assert (tagged.version, tagged.commit) == ("25.11.7", git(repository, "rev-parse", "slurm-25-11-7-1"))
    bare = tmp_path / "bare"
    git(tmp_path, "clone", "--quiet", "--bare", str(repository), str(bare))
    assert find_tree(bare).version == "26.11.0-rc1"
    assert find_tree(bare, "slurm-25-05-8-1").digest == find_tree(repository, "slurm-25-05-8-1").digest
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "META").write_text(META.format(version="23.11.11", release="1"))
    before = find_tree(plain)
    assert (before.version, before.commit) == ("23.11.11", "")
    (plain / "configure").write_text("changed")
    assert find_tree(plain).digest != before.digest


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: find_tree(place / "slurm", "25.11"), "choose a tag such as slurm-26-11-0-0rc1, slurm-25-11-7-1"),
        (lambda place: find_tree(place, "slurm-25-11-7-1"), "must be a Git repository"),
        (lambda place: find_tree(place / "none"), "or a source tree of Slurm"),
        (lambda _place: suite_named("sarge"), "forky, source-25.11.10, source-25.11.7, source-26.11.0-rc1, trixie$"),
        (lambda _place: suite_named("source-24.05"), "build --from-source"),
    ],
)
def test_mistakes_are_refused(
    repository: Path, cache: Path, tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        make(tmp_path)


def test_a_release_names_its_newest_build(cache: Path) -> None:
    assert [suite.name for suite in built_from_source()] == ["source-25.11.7", "source-25.11.10", "source-26.11.0-rc1"]
    assert suite_named("source-25.11").built == "source-25.11.10-bb"
    assert suite_named("source-25.11.7").built == "source-25.11.7-aa"
    assert suite_named("source-26.11").name == "source-26.11.0-rc1"
    assert ensure_rootfs(suite_named("source-25.11.7"), Progress()).directory == cache / "source-25.11.7-aa"
    assert Build(suite_named("source-25.11.7"), cache / "source-25.11.7-aa").complete


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--release", "slurm-25-11-7-1"], "--from-source DIR"),
        (["--from-source", ".", "--suite", "forky"], "exclude each other"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        cli._build(cli._parser().parse_args(["build", *options]))
