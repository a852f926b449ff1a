"""The Containerfile, on an image that is a sandbox's root file system; neither a registry nor an engine is needed."""

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from sandbox import host, packages
from sandbox.builds import ensure_rootfs
from sandbox.cluster import SUITES
from sandbox.support import CHECKOUT, Progress

BASE, IMAGE = "localhost/slurm", "localhost/muri"


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Buildah with a store of its own: a function of its words."""
    host.require_tools({"buildah": "buildah"})
    places = [f"--root={tmp_path}/store", f"--runroot={tmp_path}/run", "--storage-driver=overlay"]

    def buildah(*words: str | Path) -> str:
        command = ["buildah", *places, *map(str, words)]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


def test_an_image_of_slurm_gets_muri(images: Callable[..., str], tmp_path: Path) -> None:
    build, progress = ensure_rootfs(SUITES["trixie"], Progress()), Progress()
    directory = packages.ensure_packages(build, ("deb",), 1, progress)
    subprocess.run(["tar", "-C", build.root, "-cf", tmp_path / "root.tar", "."], check=True)
    empty = images("from", "scratch")
    images("add", "--quiet", empty, tmp_path / "root.tar", "/")
    images("commit", "--quiet", empty, BASE)
    (tmp_path / "root.tar").unlink()
    mounts = [f"--volume={bind.source}:{bind.target}:ro" for bind in host.apt_binds()]
    images("bud", "--isolation=chroot", *mounts, f"--file={CHECKOUT}/packaging/Containerfile",
           f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", directory)  # fmt: skip
    built = images("from", IMAGE)
    run = partial(images, "run", "--isolation=chroot", built, "--")
    assert run("muri", "--version").startswith("muri, version")
    assert run("grep", "-o", "/usr/lib/muri/.*", "/usr/lib/muri/plugstack.conf") == "/usr/lib/muri/muri_spank.so"
    assert "not found" not in run("ldd", "/usr/lib/muri/muri_spank.so")
    assert run("sh", "-c", "echo /mnt/* /usr/sbin/muri*") == "/mnt/* /usr/sbin/muri*"
