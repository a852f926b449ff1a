"""What the packages hold, in both formats."""

import re
import subprocess
from pathlib import Path

import pytest

from sandbox import namespace, packages
from sandbox.builds import ensure_rootfs
from sandbox.cluster import SUITES
from sandbox.init import Bind, Plan
from sandbox.support import CHECKOUT, Progress

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("package-files")]
NAMES = ("muri-shim", "muri-spank", "muri-node", "muri-controller")


def said(*command: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture(scope="module")
def directory() -> Path:
    progress = Progress()
    return packages.ensure_packages(ensure_rootfs(SUITES["trixie"], progress), ("deb", "rpm"), 1, progress)


def deb_files(directory: Path, name: str) -> set[str]:
    """Paths and modes of a .deb's files."""
    (file,) = directory.glob(f"{name}_*.deb")
    fields = (line.split(maxsplit=5) for line in said("dpkg-deb", "-c", file).splitlines())
    return {parts[5].removeprefix(".") for parts in fields if not parts[0].startswith("d")}


def rpm_files(directory: Path, name: str) -> set[str]:
    (file,) = directory.glob(f"{name}-[0-9]*.rpm")
    links = said("rpm", "-qp", "--qf", "[%{FILENAMES}\t%{FILELINKTOS}\t%{FILEMODES:perms}\n]", file).splitlines()
    rows = (line.split("\t") for line in links)
    return {f"{path} -> {link}" if link else path for path, link, mode in rows if not mode.startswith("d")}


@pytest.mark.parametrize("name", NAMES)
def test_both_formats_hold_the_same(directory: Path, name: str) -> None:
    deb, rpm = deb_files(directory, name), rpm_files(directory, name)
    assert deb == rpm
    (file,) = directory.glob(f"{name}-[0-9]*.rpm")
    assert "digests OK" in said("rpm", "-K", file)
    print(said("dpkg-deb", "-I", next(directory.glob(f"{name}_*.deb"))))


@pytest.mark.parametrize("name", NAMES)
def test_all_is_roots_nothing_is_set_uid_and_nobody_else_may_write(directory: Path, name: str) -> None:
    lines = [line.split(maxsplit=2) for line in said("dpkg-deb", "-c", *directory.glob(f"{name}_*.deb")).splitlines()]
    assert {owner for _, owner, _ in lines} == {"root/root"}
    assert not [mode for mode, *_ in lines if not re.fullmatch(r"l.*|.r[w-][x-]r-[x-](r-[x-]|---)", mode)]


def rebuilt(kind: str, command: str, tmp_path: Path) -> Path:
    """Run a command in a root with Slurm's headers and no network, in a folder that has the source package above it."""
    build, progress = ensure_rootfs(SUITES["trixie"], Progress()), Progress()
    source = packages.ensure_packages(build, (kind,), 1, progress)
    (tmp_path / "out").mkdir()
    plan = Plan(
        lower=str(build.root),
        mountpoint=str(tmp_path / "root"),
        binds=(Bind(str(source), "/source"), Bind(str(tmp_path / "out"), "/out", read_only=False)),
        command=("/usr/bin/unshare", "--net", "/bin/sh", "-ec", f"cd /out; {command}"),
        environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"},
    )
    with namespace.run_plan(plan, tmp_path / "plan.json") as lines:
        print(*lines)
    return tmp_path / "out"


def test_a_site_rebuilds_the_source_rpm(directory: Path, tmp_path: Path) -> None:
    out = rebuilt("srpm", "rpmbuild --rebuild --nodeps --define '_rpmdir /out' /source/muri-*.src.rpm", tmp_path)
    made = {place.name: place for place in out.glob("*/*.rpm")}
    assert {*made} == {file.name for file in directory.glob("muri-*.rpm") if not file.match("*.src.rpm")}
    asked = "[%{FILEMODES:perms} %{FILENAMES} %{FILELINKTOS}\n][%{REQUIRENEVRS} ][%{CONFLICTNEVRS} ]"
    for name, place in made.items():
        assert said("rpm", "-qp", "--qf", asked, place) == said("rpm", "-qp", "--qf", asked, directory / name)


def test_a_site_rebuilds_the_debian_source_package(directory: Path, tmp_path: Path) -> None:
    out = rebuilt("dsc", "tar -xf /source/muri_*.tar.gz; cd muri-*; debian/rules binary", tmp_path)
    made = [*out.glob("*.deb")]
    assert {place.name for place in made} == {file.name for file in directory.glob("*.deb")}
    for place in made:
        names = [re.sub(r"^(\S+ \S+).* \./", r"\1 ", line) for line in said("dpkg-deb", "-c", place).splitlines()]
        expected = said("dpkg-deb", "-c", directory / place.name).splitlines()
        assert names == [re.sub(r"^(\S+ \S+).* \./", r"\1 ", line) for line in expected]
        told = [said("dpkg-deb", "-I", each, "control") for each in (place, directory / place.name)]
        assert told[0] == re.sub("Installed-Size: .*\n", "", told[1])


def test_packages_share_no_file(directory: Path) -> None:
    files = [path for name in NAMES for path in deb_files(directory, name)]
    assert len(files) == len({*files})


def test_nodes_get_no_heavy_packages(directory: Path) -> None:
    files = deb_files(directory, "muri-node")
    held = {part for path in files for part in Path(path).parts}
    assert not held & {"numpy", "scipy", "torch", "networkx", "rustworkx"}
    assert {"pydantic", "click", "ClusterShell", "psutil", "rich", "yaml"} <= held
    for wanted in (
        "/usr/share/man/man1/muri-run.1.gz", "/usr/share/man/man1/muri-doctor.1.gz",
        "/usr/share/bash-completion/completions/muri", "/usr/lib/tmpfiles.d/muri.conf",
        "/usr/lib/systemd/system/run-muri.mount", "/usr/lib/systemd/system/run-muri-node.mount",
        "/usr/lib/muri/payload/lib/muri/launcher/run/command.py",
    ):  # fmt: skip
        assert wanted in files


def test_srun_finds_its_filter_wherever_the_plugin_is(directory: Path) -> None:
    assert {f"/usr/share/muri/cli_filter/{name}.lua" for name in ("cli_filter", "muri")} <= {
        *deb_files(directory, "muri-spank")
    }  # fmt: skip


def test_no_file_names_the_machine_that_built_it(directory: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (file,) = directory.glob(f"{name}_*.deb")
        said("dpkg-deb", "-x", file, tmp_path / name)
    # Files of others may name any path, so only installed files are checked.
    kinds = ("*.dist-info/RECORD", "*.dist-info/direct_url.json", "*.pth")
    written = [file for kind in kinds for file in tmp_path.rglob(kind)]
    assert written
    checkout = rf"(^|file://|[^[:alnum:]._/-]){re.escape(str(CHECKOUT))}($|[^[:alnum:]._-])"
    found = subprocess.run(
        ["grep", "-rlIE", "--exclude-dir=job_submit", "--exclude-dir=site-packages", "-e", checkout, "-e", "/out/node",
         tmp_path, *written],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.stdout == ""
