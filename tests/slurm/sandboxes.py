"""Sandboxes that all tests of a real Slurm share, one of each shape per test process; see docs/testing.md."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gateway_inside import EVERY_GATEWAY, SANDBOXES, GatewayInside, Servers  # noqa: E402
from muri_cluster import MuriCluster, keep_gate  # noqa: E402

from sandbox import cgroups, instance, lifecycle  # noqa: E402
from sandbox.cluster import SUITES, Partition, Shape  # noqa: E402
from sandbox.driver import Driver  # noqa: E402
from sandbox.init import HIERARCHIES  # noqa: E402
from sandbox.source import suite_named  # noqa: E402
from sandbox.support import Progress  # noqa: E402

TWO_GPUS = Shape(extra_partitions=(Partition("small", "n1"), Partition("two", "n[1-2]")))
ACCOUNTING = Shape(
    accounting=True,
    extra_partitions=(
        Partition("train", "n[1-4]"),
        Partition("middle", "n[2-3]"),
        *(Partition(f"on{number}", f"n{number}") for number in range(1, 5)),
    ),
)
#: A site's last node is reserved. `replace(SITE, bare=True)` has nothing of Muri, for tests of an installation.
SITE = Shape(nodes=3, accounting=True, site=True, extra_partitions=(Partition("train", "n1"),))
ONE_GPU = Shape(nodes=2, gpus_per_node=1, extra_partitions=(Partition("train", "n1"), Partition("measure", "n2")))


#: The Slurm that stands in for the newest one of Debian, such as source-25.11; then no other release is tried.
INSTEAD = os.environ.get("MURI_SUITE", "")
#: Why it has no pyslurm; "" where it has one.
NO_PYSLURM = lifecycle.build(suite_named(INSTEAD), Progress())[1].reason if INSTEAD else ""
#: The gateway that Muri chooses there. Where that is pyslurm, most tests of the other one are thorough.
GATEWAY = "command" if NO_PYSLURM else "pyslurm"
SECOND_GATEWAY = [] if NO_PYSLURM else [pytest.mark.thorough]
needs_pyslurm = pytest.mark.skipif(bool(NO_PYSLURM), reason=NO_PYSLURM)

_RUNNING: set[str] = set()

#: Fixtures and parameters that stand for an older release than the current one.
OLDER_RELEASE = re.compile(r"trixie|bookworm|24\.11|22\.05|\b(old|middle)_\w*sandbox")
#: They install Muri's packages, or compare them.
OF_PACKAGES = re.compile(r"test_(install|package)_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folders = {ROOT / "tests" / "slurm", ROOT / "lab" / "tests" / "slurm"}
    for item in items:
        if folders & set(item.path.parents):
            item.add_marker(pytest.mark.slurm)
            elsewhere = OF_PACKAGES.match(item.path.name) or OLDER_RELEASE.search(" ".join(_needs(item)))
            if elsewhere:
                item.add_marker(pytest.mark.thorough)
            if elsewhere and INSTEAD and INSTEAD not in _needs(item):
                item.add_marker(pytest.mark.skip(reason=f"it tries other releases than {INSTEAD}"))
            if "pyslurm" in " ".join(_needs(item)):
                item.add_marker(needs_pyslurm)
            if item.get_closest_marker("timeout") is None:
                # The first sandbox of a machine takes minutes to build.
                item.add_marker(pytest.mark.timeout(900))


def _needs(item: pytest.Item) -> list[str]:
    """The names of a test's fixtures and its parameters."""
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [*item.fixturenames, *map(str, parameters)]


_REFUSALS = {version: cgroups.refusal(version) for version in HIERARCHIES}


def suite_and_version(kind: str) -> tuple[str, str]:
    """Return a site's release and version of cgroups; its kind is the release's name, with "-v2" behind it for v2."""
    suite = kind.removesuffix("-v2")
    return suite, "v1" if suite == kind else "v2"


def sites(*kinds: str, constrained: bool, group: str = "site") -> list[Any]:
    """Return parameters, one for each kind of site; with `constrained`, they need a machine that constrains devices."""
    parameters = []
    for kind in kinds:
        # A site of a kind starts once: one process runs all tests of it.
        marks = [pytest.mark.xdist_group(f"{group}-{kind}")]
        if constrained:
            refusal = _REFUSALS[suite_and_version(kind)[1]]
            marks.append(pytest.mark.skipif(bool(refusal), reason=refusal))
        parameters.append(pytest.param(kind, marks=marks))
    return parameters


def on_sites(*suites: str) -> pytest.MarkDecorator:
    """Run a test of the fixture `site` on these releases only."""
    return pytest.mark.parametrize("site_sandbox", sites(*suites, constrained=False), indirect=True)


def on_constrained_sites(*suites: str, versions: Iterable[str] = HIERARCHIES) -> pytest.MarkDecorator:
    """Run a test of the fixture `site` on these releases, with devices constrained by each of these cgroups."""
    kinds = [kind for suite in suites for kind in (suite, f"{suite}-v2") if suite_and_version(kind)[1] in versions]
    return pytest.mark.parametrize("site_sandbox", sites(*kinds, constrained=True), indirect=True)


@pytest.fixture(autouse=True)
def as_a_test_names_it(configured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MuriCluster, "configured", staticmethod(configured))


def remove_leftovers() -> None:
    """Take down sandboxes of test runs that were killed."""
    for name in instance.names():
        kind, _, pid = name.rpartition("-")
        if kind.startswith("test-") and pid.isdigit() and not Path("/proc", pid).exists():
            lifecycle.down(name, Progress())


def start(suite: str, shape: Shape = TWO_GPUS, kind: str = "") -> Iterator[Driver]:
    """Start a sandbox; take it down when the generator goes on. Both folders' fixtures of one name share it."""
    name = f"test-{kind or suite}-{os.getpid()}"
    if name in _RUNNING:
        yield Driver.of(name)
        return
    remove_leftovers()
    lifecycle.up(name, suite_named(INSTEAD or suite), shape, Progress())
    _RUNNING.add(name)
    try:
        yield Driver.of(name)
    finally:
        _RUNNING.remove(name)
        lifecycle.down(name, Progress())


@pytest.fixture(scope="session")
def gateway_servers() -> Iterator[Servers]:
    """What calls gateways inside the sandboxes."""
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(params=SANDBOXES.values(), ids=SANDBOXES)
def gated(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An empty sandbox of each release whose gate is kept, as by a controller that died just now."""
    for driver in emptied(request.getfixturevalue(request.param)):
        keep_gate(driver)
        yield driver


@pytest.fixture(params=EVERY_GATEWAY)
def inside(request: pytest.FixtureRequest) -> Iterator[GatewayInside]:
    """Every gateway, with an empty queue before and after."""
    yield from GatewayInside.named(request.param, request)


def _sandbox(suite: str, shape: Shape = TWO_GPUS, kind: str = "") -> Any:
    def running() -> Iterator[Driver]:
        yield from start(suite, shape, kind)

    return pytest.fixture(scope="session")(running)


#: The current Slurm, 4 nodes × 2 GPUs, partitions `main`, `small` (n1) and `two` (n1 and n2).
sandbox = _sandbox("forky")
#: The current Slurm, a node with one GPU to train on (partition `train`) and one for dry runs (`measure`).
one_gpu_sandbox = _sandbox("forky", ONE_GPU, "one-gpu")
#: The current Slurm with accounts, QOS and limits; 4 nodes × 2 GPUs.
#: Partitions `main` and `train` have all nodes, `middle` n2 and n3, `on1` to `on4` one each.
accounting_sandbox = _sandbox("forky", ACCOUNTING, "accounting")

#: Debian trixie's Slurm 24.11, which no pyslurm supports, in the same shapes.
trixie_sandbox = _sandbox("trixie")
trixie_one_gpu_sandbox = _sandbox("trixie", ONE_GPU, "one-gpu-trixie")
middle_sandbox = _sandbox("trixie", ACCOUNTING, "middle")

#: Debian bookworm's Slurm 22.05, which no pyslurm supports and on which no groups form.
old_sandbox = _sandbox("bookworm")
old_accounting_sandbox = _sandbox("bookworm", ACCOUNTING, "old-accounting")


@pytest.fixture(scope="session", params=sites(*SUITES, constrained=False))
def site_sandbox(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """A site on each release: 3 nodes × 2 GPUs, the last node reserved; devices are constrained where they can be.

    Partitions `gpu` and `debug` have all nodes, `train` n1.
    """
    suite, version = suite_and_version(request.param)
    shape = replace(SITE, constrained="" if _REFUSALS[version] else version)
    yield from start(suite, shape, f"site-{request.param}")


def emptied(driver: Driver) -> Iterator[Driver]:
    """Cancel all jobs before and after a test, and kill the users' processes after it."""
    driver.cancel_all()
    yield driver
    driver.cancel_all()
    driver.run("pkill", "-KILL", "-u", "alice,bob", user="root", check=False)


def _empty(sandbox: str) -> Any:
    def empty(request: pytest.FixtureRequest) -> Iterator[Driver]:
        """Of this sandbox, or of the one that a test names."""
        yield from emptied(request.getfixturevalue(getattr(request, "param", sandbox)))

    return pytest.fixture(empty)


@pytest.fixture
def site(site_sandbox: Driver) -> Iterator[Driver]:
    """A site on each release with an empty queue, before and after."""
    yield from emptied(site_sandbox)


#: The sandboxes with an empty queue, before and after each test.
cluster = _empty("sandbox")
one_gpu = _empty("one_gpu_sandbox")
accounted = _empty("accounting_sandbox")

#: For what depends on Slurm's release: on each one where groups form.
on_both_releases = pytest.mark.parametrize("one_gpu", ["one_gpu_sandbox", "trixie_one_gpu_sandbox"], indirect=True)


@pytest.fixture
def muri(one_gpu: Driver) -> MuriCluster:
    """One GPU to share, and a controller to call."""
    return MuriCluster(one_gpu)
