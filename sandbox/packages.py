"""Builds Muri's own packages, .deb and .rpm, each suite's in the cached root of that suite.

The Python environments, which are slow to build, are cached by their inputs; so are finished packages.
"""

import contextlib
import email.utils
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sandbox import builds, host, namespace
from sandbox.builds import Build
from sandbox.init import Bind, Plan, TextFile
from sandbox.support import CHECKOUT, BuildError, Progress, cache_dir, locked_directory

SOURCES = CHECKOUT / "packaging"
LIBRARY = Path("usr/lib/muri")
_FILES = SOURCES / "files"
_COMPLETE = "complete"
_KEEP_S = 2 * 86400
_OUT = "/out"  # inside the root
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

#: What packages are made from, beside the root and the environments.
_INPUTS = ("etc", "launcher", "muri", "packaging", "policies", "profiler", "pyproject.toml", "README.md", "LICENSE",
           "sandbox/packages.py", "scripts/generate_man_pages.py", "simulator", "slurm_plugin")  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What packages are made for.

    Attributes:
        version: Muri's version and the packages' revision, such as 0.2.0-1.
        python: The Python that they need, such as python3.13.
        slurm: Slurm's release, such as 24.11.
        next_slurm: The release from which on the plugin must be compiled anew.
    """

    version: str
    python: str
    slurm: str
    next_slurm: str

    @classmethod
    def of(cls, build: Build, revision: int, python: str = "") -> "Target":
        """Return what the packages of a suite are made for; "" stands for the suite's own Python."""
        year, month = map(int, build.slurm_version.split(".")[:2])
        python = python or ".".join((build.root / "usr/bin/python3").readlink().name.split(".")[:2])
        return cls(f"{_project()['version']}-{revision}", python, f"{year}.{month:02}", f"{year}.{month + 1:02}")

    def version_of(self, package: str) -> str:
        """Return a package's version; that of the SPANK plugin names the release that it was compiled for."""
        if package != "muri-spank":
            return self.version
        upstream, _, revision = self.version.partition("-")
        return f"{upstream}+slurm{self.slurm}-{revision}"

    def filled(self, text: str) -> str:
        """Return a text of packages.toml with these values."""
        return text.format(version=self.version, python=self.python, slurm=self.slurm, next_slurm=self.next_slurm)


def ensure_packages(build: Build, kinds: Sequence[str], revision: int, progress: Progress, python: str = "") -> Path:
    """Return the directory that holds a suite's packages, building them first if there are none.

    Args:
        build: The root of the suite.
        kinds: "deb", "rpm", and their source packages "dsc", "srpm".
        revision: The packages' revision, the part of the version behind the hyphen.
        progress: Told of each step.
        python: For which Python source packages are, such as python3.12; "": the suite's.

    Raises:
        BuildError: A step failed; the text says which, and why.
    """
    target = Target.of(build, revision, python)
    environments = ensure_environments(build, progress)
    key = _digest([target.version, target.python, environments.name, *_input_lines()])
    directory = cache_dir() / "packages" / f"{build.suite.name}-{key}"
    with locked_directory(directory.parent / f"{build.suite.name}.lock", progress, "another build of packages"):
        missing = [kind for kind in kinds if not (directory / f"{_COMPLETE}-{kind}").exists()]
        if missing:
            _forget_old(directory.parent, build.suite.name)
            host.require_tools({"rpmbuild": "rpm", "dpkg-source": "dpkg-dev"} if missing != ["deb"] else {})
            directory.mkdir(parents=True, exist_ok=True)
            with _temporary(directory.parent) as temporary:
                trees = _stage(build, environments, temporary, progress)
                for kind in missing:
                    progress.step(f"packing the {kind} packages of {build.suite.name}")
                    _PACKERS[kind](target, trees, temporary, directory)
                    (directory / f"{_COMPLETE}-{kind}").touch()
    return directory


def _forget_old(folder: Path, suite: str) -> None:
    """Delete packages of sources that have long changed."""
    for old in folder.glob(f"{suite}-*/"):
        if time.time() - old.stat().st_mtime > _KEEP_S:
            shutil.rmtree(old, ignore_errors=True)


def ensure_environments(build: Build, progress: Progress) -> Path:
    """Return the cached Python environments of a suite, building them first if there are none."""
    texts = _environment_texts(build)
    key = _digest([build.directory.name, *sorted(f"{name} {text}" for name, text in texts.items())])
    directory = cache_dir() / "packages" / f"environments-{build.suite.name}-{key}"
    if directory.exists():
        return directory
    with locked_directory(directory.parent / f"{build.suite.name}.lock", progress, "another build of packages"):
        if not directory.exists():
            progress.step(f"installing the packages' Python environments for {build.suite.name} (a minute or two)")
            with _temporary(directory.parent) as temporary:
                output = temporary / "out"
                output.mkdir(mode=0o755)
                _run_in_root(build, temporary, output, texts, ("/bin/sh", "/tmp/build-in-root", _OUT), progress)
                output.rename(directory)
    return directory


def _environment_texts(build: Build) -> dict[str, str]:
    """Return the files, by their path in the root, that decide what the environments hold."""
    texts = {"/tmp/build-in-root": (SOURCES / "build-in-root").read_text(encoding="utf-8")}
    for environment, lines in python_requirements().items():
        texts[f"/tmp/{environment}.txt"] = "".join(f"{line}\n" for line in lines)
    if ".".join(build.slurm_version.split(".")[:2]) in builds.BUILDABLE_FOR:
        texts["/tmp/build-pyslurm"] = build.pyslurm_script
    return texts


def _run_in_root(build: Build, temporary: Path, output: Path, texts: Mapping[str, str], command: tuple[str, ...],
                 progress: Progress) -> None:  # fmt: skip
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(Path.home()), "LC_ALL": "C.UTF-8"}
    plan = Plan(
        lower=str(build.root),
        mountpoint=str(temporary / "mnt"),
        binds=(*host.pip_binds(), *host.apt_binds(), Bind(str(output), _OUT, read_only=False)),
        files=tuple(TextFile(path, text, 0o755) for path, text in texts.items()),
        directories=("/tmp",),
        command=command,
        environment={**environment, **host.pip_environment(), "MAKEFLAGS": f"-j{os.cpu_count() or 1}"},
    )
    log = cache_dir() / "packages" / f"{build.suite.name}.log"
    recent: list[str] = []
    try:
        with log.open("w", encoding="utf-8") as stream, namespace.run_plan(plan, temporary / "plan.json") as lines:
            for line in lines:
                stream.write(line)
                recent = [*recent[-14:], line.rstrip()]
                progress.detail(line.strip()[:90])
    except subprocess.CalledProcessError as err:
        said = "\n  ".join(recent)
        raise BuildError(f"a step in the root of {build.suite.name} failed (its log is {log}):\n  {said}") from err


# --- what each package holds


def _stage(build: Build, environments: Path, temporary: Path, progress: Progress) -> dict[str, Path]:
    """Put together the file tree of each package."""
    trees = {name: temporary / name for name in package_table()}
    for tree in trees.values():
        tree.mkdir(mode=0o755)
    _stage_shim(trees["muri-shim"])
    _stage_spank(build, trees["muri-spank"], temporary, progress)
    _stage_node(trees["muri-node"], environments, temporary, progress)
    _stage_controller(trees["muri-controller"], environments)
    for name, tree in trees.items():
        _put(CHECKOUT / "LICENSE", tree / f"usr/share/doc/{name}/copyright")
    return trees


def _stage_shim(tree: Path) -> None:
    _put(_FILES / "muri", tree / "usr/bin/muri", 0o755)
    _put(_FILES / "stand_in/muri/__init__.py", tree / LIBRARY / "stand_in/muri/__init__.py")


def _stage_spank(build: Build, tree: Path, temporary: Path, progress: Progress) -> None:
    output = temporary / "spank"
    shutil.copytree(CHECKOUT / "slurm_plugin/spank", output)
    make = ("/usr/bin/make", f"--directory={_OUT}", "--always-make", "CFLAGS=-O2", "OUT=muri_spank.so")
    _run_in_root(build, temporary, output, {}, make, progress)
    plugin = LIBRARY / "muri_spank.so"  # by its whole path, as sites have Slurm's own plugins in many places
    _put(output / plugin.name, tree / plugin)
    text = (CHECKOUT / "etc/plugstack.conf.d/muri.conf").read_text(encoding="utf-8")
    _write(tree / LIBRARY / "plugstack.conf", text.replace("optional muri_spank.so", f"optional /{plugin}"))
    _put_lua("cli_filter", tree)


def _put_lua(folder: str, tree: Path) -> None:
    for source in sorted((CHECKOUT / "slurm_plugin" / folder).glob("*.lua")):
        _put(source, tree / "usr/share/muri" / folder / source.name)


_COMPLETION: Final = """
import os, sys
os.environ["_MURI_COMPLETE"] = "{shell}_source"
sys.argv[0] = "muri"
from muri.cli import main
main()
"""
"""Prints click's script for a shell, as `_MURI_COMPLETE=bash_source muri` does."""


def _stage_node(tree: Path, environments: Path, temporary: Path, progress: Progress) -> None:
    payload = tree / LIBRARY / "payload"
    _link_tree(environments / "node", payload / "node")
    _install_muri(payload / "lib", temporary, progress)
    for name in ("python", "activate", "deactivate"):
        _put(_FILES / name, tree / LIBRARY / name, 0o755)
    for name in ("run-muri.mount", "run-muri-node.mount"):
        _put(CHECKOUT / "etc/systemd" / name, tree / "usr/lib/systemd/system" / name)
    _put(CHECKOUT / "etc/tmpfiles.d/muri.conf", tree / "usr/lib/tmpfiles.d/muri.conf")
    _move(payload / "node/packages.txt", tree / "usr/share/doc/muri-node/packages.txt")
    for shell, place in (
        ("bash", "bash-completion/completions/muri"),
        ("zsh", "zsh/vendor-completions/_muri"),
        ("fish", "fish/vendor_completions.d/muri.fish"),
    ):
        _write(
            tree / "usr/share" / place,
            _muri(payload / "lib", "-c", _COMPLETION.format(shell=shell)),
        )
    pages = temporary / "man"
    _muri(payload / "lib", str(CHECKOUT / "scripts/generate_man_pages.py"), str(pages))
    for page in sorted(pages.iterdir()):
        _compress(page, tree / f"usr/share/man/man{page.suffix[1:]}/{page.name}.gz")


def _stage_controller(tree: Path, environments: Path) -> None:
    payload = tree / LIBRARY / "payload"
    _link_tree(environments / "controller", payload / "controller")
    _put(_FILES / "muri-controller", tree / "usr/sbin/muri-controller", 0o755)
    for unit in sorted((CHECKOUT / "etc/systemd").iterdir()):
        if unit.name.startswith("muri-"):
            _put(unit, tree / "usr/lib/systemd/system" / unit.name)
    _put(CHECKOUT / "etc/muri.yaml", tree / "etc/muri/muri.yaml")
    _put(CHECKOUT / "etc/logrotate.d/muri", tree / "etc/logrotate.d/muri")
    _put(CHECKOUT / "etc/cron.d-muri", tree / "usr/share/doc/muri-controller/examples/cron.d-muri")
    _put_lua("job_submit", tree)
    for name in ("grafana/muri.json", "prometheus/muri-alerts.yaml"):
        _put(CHECKOUT / "etc" / name, tree / "usr/share/muri" / name)
    _move(payload / "controller/packages.txt", tree / "usr/share/doc/muri-controller/packages.txt")


def _install_muri(lib: Path, temporary: Path, progress: Progress) -> None:
    """Install this checkout's package, and nothing else, into a directory."""
    progress.step("installing Muri itself")
    source = temporary / "source"
    for name in _files():
        _put(CHECKOUT / name, source / name, (CHECKOUT / name).stat().st_mode & 0o777)
    pip = [str(_venv_python()), "-m", "pip", "install", "--quiet", "--quiet", "--no-deps", "--no-build-isolation",
           "--no-compile", "--target", str(lib), str(source)]  # fmt: skip
    _checked(pip, "install Muri")
    shutil.rmtree(lib / "bin", ignore_errors=True)
    # A Python that has the record counts as one in which Muri is installed, whose scripts run under it.
    for record in lib.glob("*.dist-info"):
        shutil.rmtree(record)


def _muri(lib: Path, *arguments: str) -> str:
    """Run a script with this build's Muri and the checkout's environment; returns its output."""
    return _checked([str(_venv_python()), *arguments], f"run {arguments[-1]}", {"PYTHONPATH": str(lib)})


# --- .deb and .rpm


def _pack_deb(target: Target, trees: Mapping[str, Path], temporary: Path, directory: Path) -> None:
    for name, entry in package_table().items():
        tree = temporary / "deb" / name
        _link_tree(trees[name], tree)
        _describe_deb(target, name, entry, tree)
        architecture = _architecture() if entry.get("native") else "all"
        file = directory / f"{name}_{target.version_of(name)}_{architecture}.deb"
        _checked(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z3", "--build", str(tree), str(file)], f"pack {name}",
                 {"SOURCE_DATE_EPOCH": _epoch_s()})  # fmt: skip


def _describe_deb(target: Target, name: str, entry: Mapping[str, Any], tree: Path) -> None:
    control = tree / "DEBIAN"
    _write(control / "control", deb_control(target, name, entry, _size_kib(tree)))
    for script, text in maintainer_scripts(target, name).items():
        _write(control / script, f"#!/bin/sh\nset -eu\n{text}", 0o755)
    if entry.get("conffiles"):
        _write(control / "conffiles", "".join(f"{path}\n" for path in entry["conffiles"]))


def deb_control(target: Target, name: str, entry: Mapping[str, Any], size_kib: int) -> str:
    """Return the file `control` of a .deb."""
    version = target.version_of(name)
    depends = [f"{needed} (= {target.version})" for needed in entry.get("needs", ())]
    depends += [target.filled(relation) for relation in entry.get("deb_depends", ())]
    fields = {
        "Package": name,
        "Version": version,
        "Architecture": _architecture() if entry.get("native") else "all",
        "Maintainer": _MAINTAINER,
        "Installed-Size": str(size_kib),
        "Depends": ", ".join(depends),
        "Recommends": ", ".join(entry.get("recommends", ())),
        "Section": "admin",
        "Priority": "optional",
        "Description": target.filled(entry["summary"]),
    }
    lines = [f"{key}: {value}" for key, value in fields.items() if value]
    return "\n".join([*lines, *(f" {line}" for line in entry["description"].strip().splitlines()), ""])


def maintainer_scripts(target: Target, name: str) -> dict[str, str]:
    """Return a .deb's scripts of installation and removal: shell texts by the script's name."""
    version = target.version_of(name)
    scripts = {"preinst": _REFUSE_DOWNGRADE.format(name=name, version=version)}
    if name == "muri-shim":
        scripts["postrm"] = f"rm -rf /{LIBRARY}/stand_in/muri/__pycache__\n{_FORGET}"
    parts = _PARTS.get(name)
    if parts:
        scripts["postinst"] = (
            f'[ "$1" = configure ] || exit 0\n/{LIBRARY}/activate {parts} {target.version}\n{_RELOAD}{_MADE[name]}'
        )
        scripts["prerm"] = f'[ "$1" = remove ] || exit 0\n{_STOPS[name]}/{LIBRARY}/deactivate {parts}\n'
        scripts["postrm"] = _RELOAD + _FORGET
    return scripts


_PARTS = {"muri-node": "node lib", "muri-controller": "controller"}

_MADE = {
    "muri-node": "! command -v systemd-tmpfiles >/dev/null || "
    "systemd-tmpfiles --create /usr/lib/tmpfiles.d/muri.conf\n",
    # The process that stays must not go on with the old version.
    "muri-controller": "install -d -m 0750 /var/log/muri\n"
    "[ ! -d /run/systemd/system ] || systemctl try-restart muri-controller-events.service || true\n",
}

_STOPS = {
    "muri-node": "! command -v systemctl >/dev/null || "
    "systemctl disable --now run-muri.mount >/dev/null 2>&1 || true\n",
    "muri-controller": "! command -v systemctl >/dev/null || systemctl disable --now "
    "muri-controller-events.service muri-controller.timer muri-watchdog.timer >/dev/null 2>&1 || true\n",
}

#: Empty directories that dpkg leaves because files of its own never lay in them.
_FORGET = f"rmdir /{LIBRARY}/stand_in/muri /{LIBRARY}/stand_in /{LIBRARY} 2>/dev/null || true\n"

_RELOAD = "[ ! -d /run/systemd/system ] || systemctl daemon-reload || true\n"

_REFUSE_DOWNGRADE = """\
if [ "$1" = upgrade ] && dpkg --compare-versions "$2" gt {version}; then
    cat >&2 <<END
{name} $2 is installed and newer than {version}: its journal, and the groups that run, may have a newer form.
To go back: \\`muri drain --wait\\`, remove muri-controller, muri-node, muri-spank and muri-shim, and install {version}.
END
    exit 1
fi
"""


def _pack_rpm(target: Target, trees: Mapping[str, Path], temporary: Path, directory: Path) -> None:
    copies = "\n".join(f"cp -a '{tree}/.' '%{{buildroot}}/'" for tree in trees.values())
    _write(temporary / "muri.spec", rpm_spec(target, trees, f"%install\n{copies}\n"))
    _rpmbuild("-bb", temporary, {
        "_rpmdir": str(directory), "_build_name_fmt": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
        "_binary_payload": "w3.gzdio",
    })  # fmt: skip


def _rpmbuild(what: str, temporary: Path, defines: Mapping[str, str]) -> None:
    every = {
        "_topdir": str(temporary / "rpm"), "_buildhost": "localhost", "use_source_date_epoch_as_buildtime": "1",
        "clamp_mtime_to_source_date_epoch": "1", **defines,
    }  # fmt: skip
    options = [word for key, value in every.items() for word in ("--define", f"{key} {value}")]
    command = ["rpmbuild", what, "--nodeps", *options, str(temporary / "muri.spec")]
    _checked(command, "pack rpm packages", {"SOURCE_DATE_EPOCH": _epoch_s()})


def _pack_srpm(target: Target, trees: Mapping[str, Path], temporary: Path, directory: Path) -> None:
    source = _sources(target, trees, temporary / "srpm")
    tar = ["tar", "--sort=name", f"--mtime=@{_epoch_s()}", "--owner=0", "--group=0", "--numeric-owner", "--gzip",
           f"--directory={source.parent}", "--create", f"--file={source}.tar.gz", source.name]  # fmt: skip
    _checked(tar, "pack the sources")
    released = replace(target, slurm="%{slurm}", next_slurm="%{next_slurm}")
    _write(temporary / "muri.spec", _SRPM_MACROS + rpm_spec(released, trees, _SRPM_STEPS.format(python=target.python)))
    _rpmbuild("-bs", temporary, {"_sourcedir": str(source.parent), "_srcrpmdir": str(directory)})


def _pack_dsc(target: Target, trees: Mapping[str, Path], temporary: Path, directory: Path) -> None:
    source = _sources(target, trees, temporary / "dsc")
    released = replace(target, slurm="@SLURM@", next_slurm="@NEXT_SLURM@")
    control = (
        f"Source: muri\nMaintainer: {_MAINTAINER}\nSection: admin\nPriority: optional\n"
        f"Build-Depends: gcc, make, {target.python}-venv, libslurm-dev | slurm-smd-dev\n"
    )
    for name, entry in package_table().items():
        _describe_deb(released, name, entry, source / "trees" / name)
        architecture = "any" if entry.get("native") else "all"
        control += (
            f"\nPackage: {name}\nArchitecture: {architecture}\nDescription: {released.filled(entry['summary'])}\n"
        )
    _write(source / "debian/control", control)
    rules = (SOURCES / "debian-rules").read_text(encoding="utf-8")
    _write(source / "debian/rules", rules.replace("@PYTHON@", target.python), 0o755)
    date = email.utils.formatdate(int(_epoch_s()))
    log = f"muri ({target.version}) unstable; urgency=low\n\n  * See CHANGELOG.md.\n\n -- {_MAINTAINER}  {date}\n"
    _write(source / "debian/changelog", log)
    _write(source / "debian/source/format", "1.0\n")
    command = ["sh", "-c", 'cd "$0" && exec dpkg-source --build "$1"', str(directory), str(source)]
    _checked(command, "pack the sources", {"SOURCE_DATE_EPOCH": _epoch_s()})


_MAINTAINER: Final = "Muri maintainers <muri@localhost>"


def _sources(target: Target, trees: Mapping[str, Path], place: Path) -> Path:
    """Put together the finished trees without the plugin and the environments, and the sources and wheels of these."""
    source = place / f"muri-{target.version.partition('-')[0]}"
    for package, tree in trees.items():
        copy = source / "trees" / package
        _link_tree(tree, copy)
        for built in ("payload/node", "payload/controller"):
            shutil.rmtree(copy / LIBRARY / built, ignore_errors=True)
        (copy / LIBRARY / "muri_spank.so").unlink(missing_ok=True)
    for file in _files():
        if file.startswith("slurm_plugin/spank/"):
            _put(CHECKOUT / file, source / "spank" / Path(file).name)
    for name in ("build-from-source", "build-in-root"):
        _put(SOURCES / name, source / name)
    for environment, lines in python_requirements().items():
        _write(source / f"{environment}.txt", "".join(f"{line}\n" for line in lines))
    platforms = [f"--platform=manylinux{tag}_{os.uname().machine}" for tag in _OLD_GLIBC]
    pip = [str(_venv_python()), "-m", "pip", "download", "--quiet", "--quiet", "--only-binary=:all:", *platforms,
           f"--python-version={target.python.removeprefix('python')}", "--dest", str(source / "wheels"),
           "--requirement", str(source / "node.txt"), "--requirement", str(source / "controller.txt")]  # fmt: skip
    _checked(pip, "download the wheels of a source package")
    return source


#: Wheels that Enterprise Linux 8 can use, too.
_OLD_GLIBC = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "_2_12", "2010")

_SRPM_MACROS: Final = """\
%{!?slurm_include: %global slurm_include /usr/include}
%global slurm_number %(grep -m1 -o '0x[0-9a-f]*' %{slurm_include}/slurm/slurm_version.h 2>/dev/null || echo 0)
%global slurm %(n=%{slurm_number}; printf %%d.%%02d $((n >> 16)) $((n >> 8 & 255)))
%global next_slurm %(n=%{slurm_number}; printf %%d.%%02d $((n >> 16)) $(((n >> 8 & 255) + 1)))
"""


_SRPM_STEPS: Final = """\
%prep
%setup -q

%build
sh ./build-from-source %{{slurm_include}} /usr/bin/{python}

%install
cp -a trees/*/. %{{buildroot}}/
"""


def rpm_spec(target: Target, trees: Mapping[str, Path], steps: str) -> str:
    """Return the spec file of all packages.

    Args:
        target: Their version, Python and Slurm.
        trees: Each package's files.
        steps: The sections up to %install.
    """
    upstream, _, revision = target.version.partition("-")
    head = [
        "%global __os_install_post %{nil}", "%global debug_package %{nil}", "%global _build_id_links none",
        "Name: muri", f"Version: {upstream}", f"Release: {revision}", "License: Apache-2.0", "Summary: Muri",
        *(["Source0: muri-%{version}.tar.gz", "BuildRequires: gcc make", f"BuildRequires: /usr/bin/{target.python}",
           "BuildRequires: %{slurm_include}/slurm/spank.h"] if "%build" in steps else []),
        "", "%description", "Muri's packages.", "",
    ]  # fmt: skip
    packages = [_rpm_package(target, name, entry, trees[name]) for name, entry in package_table().items()]
    return "\n".join(head) + "".join(packages) + f"\n{steps}"


def _rpm_package(target: Target, name: str, entry: Mapping[str, Any], tree: Path) -> str:
    upstream, _, revision = target.version_of(name).partition("-")
    lines = [
        f"\n%package -n {name}", f"Version: {upstream}", f"Release: {revision}",
        f"Summary: {target.filled(entry['summary'])}", "AutoReqProv: no",
        *(["BuildArch: noarch"] if not entry.get("native") else []),
        *(f"Requires: {needed} = {target.version}" for needed in entry.get("needs", ())),
        *(f"Requires: {target.filled(relation)}" for relation in entry.get("rpm_requires", ())),
        *(f"Conflicts: {target.filled(relation)}" for relation in entry.get("rpm_conflicts", ())),
    ]  # fmt: skip
    listed = _rpm_entries(tree, entry.get("conffiles", ()))
    return "\n".join([*lines, f"\n%description -n {name}", entry["description"].strip(), "", rpm_scripts(target, name),
                      f"%files -n {name}", "%defattr(-,root,root,-)", *listed, ""])  # fmt: skip


def rpm_scripts(target: Target, name: str) -> str:
    """Return an .rpm's scripts of installation and removal, as sections of the spec file."""
    if name == "muri-shim":
        return f'%preun -n {name}\n[ "$1" != 0 ] || rm -rf /{LIBRARY}/stand_in/muri/__pycache__\n\n'
    parts = _PARTS.get(name)
    if not parts:
        return ""
    refuse = _REFUSE_RPM_DOWNGRADE.format(name=name, part=parts.split()[0], version=target.version)
    # In %post the files of the version before would still be there: rpm deletes them later than dpkg.
    return (
        f"%pre -n {name} -p <lua>\n{refuse}\n"
        f"%posttrans -n {name}\n/{LIBRARY}/activate {parts} {target.version}\n{_RELOAD}{_MADE[name]}\n"
        f'%preun -n {name}\n[ "$1" = 0 ] || exit 0\n{_STOPS[name]}/{LIBRARY}/deactivate {parts}\n\n'
        f"%postun -n {name}\n{_RELOAD}\n"
    )


_REFUSE_RPM_DOWNGRADE = """\
local used = posix.readlink("/usr/lib/muri/{part}")
local installed = used and used:match("^versions/([^/]+)/")
if installed and rpm.vercmp(installed, "{version}") > 0 then
    error("{name} " .. installed .. " is installed and newer than {version}: " ..
        "its journal, and the groups that run, may have a newer form. To go back: muri drain --wait, " ..
        "remove muri-controller, muri-node, muri-spank and muri-shim, and install {version}.", 0)
end
"""


def _rpm_entries(tree: Path, conffiles: Iterable[str]) -> Iterator[str]:
    """The lines of %files: whole directories of Muri's own, and single files elsewhere."""
    own = [tree / LIBRARY / "payload/node", tree / LIBRARY / "payload/lib", tree / LIBRARY / "payload/controller"]
    for place in own:
        if place.exists():
            yield f'"/{place.relative_to(tree)}"'
    for path in sorted(tree.rglob("*")):
        relative = path.relative_to(tree)
        if path in own or any(place in path.parents for place in own):
            continue
        if path.is_dir():
            if any(part.startswith("muri") for part in relative.parts):  # others belong to other packages
                yield f'%dir "/{relative}"'
            continue
        name = f"/{relative}"
        yield f'{"%config(noreplace) " if name in conffiles else ""}"{name}"'


_PACKERS = {"deb": _pack_deb, "rpm": _pack_rpm, "srpm": _pack_srpm, "dsc": _pack_dsc}


# --- facts


def package_table() -> dict[str, dict[str, Any]]:
    """Return the packages by their names, as packaging/packages.toml describes them."""
    return tomllib.loads((SOURCES / "packages.toml").read_text(encoding="utf-8"))


def python_requirements() -> dict[str, list[str]]:
    """Return the Python requirements of the packages' environments, "node" and "controller", as pip reads them."""
    dependencies: list[str] = _project()["dependencies"]
    extras: dict[str, list[str]] = _project()["optional-dependencies"]
    wanted = package_table()["muri-node"]["python"]
    every = [*dependencies, *(line for lines in extras.values() for line in lines)]
    node = [line for line in every if re.split(r"[^\w-]", line)[0].lower() in wanted]
    return {"node": node, "controller": [*dependencies, *(line for line in node if line not in dependencies)]}


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project


def _architecture() -> str:
    machine = os.uname().machine
    return _ARCHITECTURES.get(machine, machine)


def _files() -> list[str]:
    """What packages are made from: the files that git knows, or would add."""
    command = [
        "git",
        "-C",
        str(CHECKOUT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *_INPUTS,
    ]
    names = _checked(command, "list the checkout's files").split("\0")
    return sorted(name for name in set(names) if name and (CHECKOUT / name).is_file())


def _input_lines() -> Iterator[str]:
    for name in _files():
        yield f"{name} {hashlib.sha256((CHECKOUT / name).read_bytes()).hexdigest()}"


def _epoch_s() -> str:
    """When what packages are made from last changed, so that the same sources give the same bytes."""
    return _checked(["git", "-C", str(CHECKOUT), "log", "-1", "--format=%ct", "--", *_INPUTS], "read git's log").strip()


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def _venv_python() -> Path:
    python = CHECKOUT / ".venv/bin/python"
    if not python.exists():
        raise BuildError(f"{python} is missing: run scripts/make-venv first")
    return python


def _size_kib(tree: Path) -> int:
    return sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) // 1024 + 1


def _checked(command: Sequence[str], what: str, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})}
    )
    if done.returncode != 0:
        raise BuildError(f"could not {what}: `{command[0]}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _put(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _link_tree(source: Path, target: Path) -> None:
    """Copy a tree by hard links: nothing changes its files."""
    shutil.copytree(source, target, symlinks=True, copy_function=os.link)


def _write(target: Path, text: str, mode: int = 0o644) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    target.chmod(mode)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    source.rename(target)


def _compress(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(source.read_bytes(), 9, mtime=0))


@contextlib.contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="building-", dir=parent) as name:
        Path(name).chmod(0o755)
        yield Path(name)
