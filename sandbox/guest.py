"""Slurm's own tests as a guest: the same ones without Muri, beside Muri, and with each batch job marked for it."""

import datetime
import itertools
import queue
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final

from sandbox import lifecycle, releases_page
from sandbox.builds import ensure_rootfs
from sandbox.cluster import Shape, Suite, cluster_name
from sandbox.driver import Driver
from sandbox.releases_page import OUTCOMES
from sandbox.source import Tree, ensure_built, export
from sandbox.support import CHECKOUT, CONTROLLER, Progress, SandboxError, UsageError

RESULT: Final = CHECKOUT / "lab/muri_lab/benchmarks/results/guest-tests.json"

#: Slurm's numbers of the commands and features that Muri touches.
GROUPS: Final = {
    "103": "salloc", "105": "sbatch", "107": "scancel", "108": "scontrol", "114": "squeue", "116": "srun",
    "121": "MPS and shards", "122": "job arrays", "123": "reservations", "124": "accounts", "126": "partitions' limits",
    "127": "Epilog", "128": "preemption", "130": "priorities", "132": "Prolog", "135": "TaskEpilog",
    "136": "specialized cores", "139": "steps' GPUs", "140": "TRES", "141": "nodes of a cloud",
    "144": "GRES", "145": "constraints", "146": "limits of partitions", "147": "SPANK",
    # testsuite/expect, on the sandbox's own cluster
    "6": "scancel", "17": "sbatch", "28": "job arrays", "39": "GPUs",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way of running the tests.

    Attributes:
        muri: Whether Muri's plugins are installed and its controller runs.
        marked: Whether the tests' user has set SBATCH_MURI.
    """

    name: str
    muri: bool
    marked: bool = False


WITHOUT: Final = Way("without Muri", muri=False)
WAYS: Final = (WITHOUT, Way("beside Muri", muri=True), Way("all marked", muri=True, marked=True))

#: Tests that say themselves what stands there; then Muri's words are not in the line.
_REPLACED: Final = re.compile(
    r'(?:require|set)_config_parameter\(\s*"(GresTypes|Licenses|JobSubmitPlugins|CliFilterPlugins)"'
)

_HOME: Final = "/opt/slurm-tests"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: As docs/install.md says.
_OF_MURI: Final = "GresTypes=gpu,muri\nLicenses=muri_gate:1000000\nJobSubmitPlugins=lua\nCliFilterPlugins=lua"

_INSTALL: Final = f"""
set -eu
echo 'alice ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/alice
[ -e /usr/lib/slurm ] || ln -s "/usr/lib/$(gcc -print-multiarch)/slurm" /usr/lib/slurm
printf '%s\\n' 'SlurmSourceDir = {_HOME}' 'SlurmBuildDir = {_HOME}/build' 'SlurmInstallDir = /usr' \
    'SlurmConfigDir = /etc/slurm' > {_HOME}/testsuite/testsuite.conf
chown -R alice {_HOME}
"""

#: The tests in Python start and end the daemons themselves, and change Slurm's files and database by sudo.
_HAND_OVER: Final = """
set -eu
mariadb --execute "ALTER USER root@localhost IDENTIFIED BY ''; DROP DATABASE slurm_acct_db"
pkill -x slurmctld; pkill -x slurmd; pkill -x slurmdbd
while pgrep -x 'slurmctld|slurmd|slurmdbd' >/dev/null; do sleep 0.1; done
rm -rf /var/spool/slurmctld/* /etc/slurm/gres.conf
mkdir -p /var/log/slurm
"""

#: Each module begins from the same files, whatever the one before left.
_RESET: Final = f"""
pkill -KILL -x 'slurmctld|slurmd|slurmdbd|slurmstepd|sackd'
rm -rf /var/spool/slurmctld* /tmp/node*
mkdir /var/spool/slurmctld
[ -d {_HOME}/etc ] || cp -a /etc/slurm {_HOME}/etc
rsync -a --delete {_HOME}/etc/ /etc/slurm/
"""

_INTERVAL_S: Final = 5
_CONTROLLER_LOG: Final = "/var/log/muri-controller.log"

#: A module that takes longer hangs.
_LONGEST_S: Final = 1200

#: How many sandboxes each way has; the tests mostly wait.
_SANDBOXES: Final = 2

#: How often the tests that do not end alike are run again, with nothing beside them but the other ways.
_AGAIN: Final = 2

#: Why tests, by the beginnings of their names, cannot pass beside Muri.
CAUSES: Final = {
    "test_123_3::": "it counts all reservations, and `muri_gate` is one",
    "test_140_1::test_license_allocation": "it reads the first license that Slurm lists, now `muri_gate`",
}

#: What tests came to: by way and test one of `OUTCOMES` for each time.
Found = dict[str, dict[str, list[str]]]


def outcomes(junit: str) -> dict[str, str]:
    """Return what became of each test of a report in JUnit's format, by module and test."""
    found = {}
    for (place, name), outcome in releases_page.outcomes(junit).items():
        named = re.search(r"test_\d+_\d+", place or name)
        module = named[0] if named else name
        found[f"{module}::{name}" if place else module] = outcome
    return found


def best(found: Found, way: Way, test: str) -> str:
    """Return the best outcome of a test in one way, which counts; "" if it did not run."""
    return min(found[way.name].get(test, []), key=OUTCOMES.index, default="")


def differences(found: Found) -> list[str]:
    """Return the tests that pass without Muri, and never with it in one of the other ways."""
    passed = (test for test in sorted(found[WITHOUT.name]) if best(found, WITHOUT, test) == "passed")
    return [test for test in passed if any(best(found, way, test) != "passed" for way in WAYS)]


def cause(test: str) -> str:
    """Return why a test cannot pass beside Muri, "" if that is not known."""
    return next((why for start, why in CAUSES.items() if test.startswith(start)), "")


def chances(found: Found) -> list[str]:
    """Return the tests that do not always end alike in one and the same way."""
    return sorted({test for ran in found.values() for test, seen in ran.items() if len(set(seen)) > 1})


def table(found: Found) -> str:
    """Return the counts of each group, in Markdown."""
    lines = [f"| group | {' | '.join(way.name for way in WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    tests = sorted({test for ran in found.values() for test in ran})
    of_group: dict[str, list[str]] = {}
    for test in tests:
        of_group.setdefault(re.findall(r"\d+", test)[0], []).append(test)
    for group, chosen in [*sorted(of_group.items(), key=lambda item: int(item[0])), ("all", tests)]:
        cells = []
        for way in WAYS:
            counted = Counter(best(found, way, test) for test in chosen)
            cells.append(" / ".join(str(counted[outcome]) for outcome in ("passed", "failed", "skipped", "error")))
        lines.append(f"| {group} {GROUPS.get(group, '')} | {' | '.join(cells)} |".replace("  |", " |"))
    return "\n".join(lines)


def report(result: Mapping[str, Any]) -> str:
    """Return the figures of a run and its differences, in Markdown."""
    found: Found = result["found"]
    differ = Counter(
        f"of `{_file_of(test)}` ({cause(test)})" if cause(test) else f"`{test}` (cause unknown)"
        for test in differences(found)
    )
    by_chance = Counter(f"of `{_file_of(test)}`" for test in chances(found))
    parts = (
        f"Slurm {result['slurm']}, {result['date']}: tests passed / failed / skipped / with an error. Beside Muri "
        f"{result['released'][WAYS[1].name]} jobs waited for Muri, all marked {result['released'][WAYS[2].name]}.",
        table(found),
        f"Only without Muri: {', '.join(f'{count} {tests}' for tests, count in differ.items()) or 'none'}.",
        f"By chance: {', '.join(f'{count} {tests}' for tests, count in by_chance.items()) or 'none'}.",
        f"Muri's words replaced by their own in: {', '.join(f'`{each}`' for each in result['replaced']) or 'none'}.",
    )
    return "\n\n".join(parts)


@contextmanager
def _host(name: str, way: Way, suite: Suite, testsuite: Path, progress: Progress) -> Iterator[Driver]:
    """A cluster as any sandbox has it, and the tests in it."""
    instance, _ = lifecycle.up(name, suite, Shape(accounting=True, bare=not way.muri), progress)
    try:
        driver = Driver(instance)
        with _controller(driver) if way.muri else nullcontext():
            home = instance.root_of(CONTROLLER) / _HOME.lstrip("/")
            shutil.copytree(testsuite, home / "testsuite", symlinks=True)
            (home / "build").mkdir()
            shutil.copy(ensure_rootfs(suite, progress).directory / "config.h", home / "build")
            driver.run("sh", "-c", _INSTALL, user="root")
            yield driver
    finally:
        lifecycle.down(name, progress)


def _hand_over(driver: Driver, way: Way) -> None:
    """Leave configuration and daemons to the tests in Python."""
    driver.run("sh", "-c", _HAND_OVER, user="root")
    text = (CHECKOUT / "etc/sandbox/guest.conf").read_text(encoding="utf-8")
    gres = _OF_MURI if way.muri else "GresTypes=gpu"
    config = Template(text).substitute(cluster=cluster_name(driver.instance.name), muri=gres)
    driver.write("/etc/slurm/slurm.conf", config, user="root", mode="0644")


@contextmanager
def _controller(driver: Driver) -> Iterator[None]:
    """Have Muri's controller at work, which starts where slurmctld runs and stays when that ends."""
    driver.write("/etc/muri/muri.yaml", "{}\n", user="root", mode="0644")
    command = f"exec muri-controller --interval {_INTERVAL_S} >{_CONTROLLER_LOG} 2>&1"
    controller = driver.popen("sh", "-c", command, user="root")
    driver.wait_until(lambda: bool(driver.run("scontrol", "show", "reservation", "muri_gate").stdout), "Muri's gate")
    try:
        yield
        if controller.poll() is not None:
            log = driver.run("tail", _CONTROLLER_LOG, user="root").stdout
            raise SandboxError(f"Muri's controller ended with {controller.returncode}:\n{log}")
    finally:
        controller.terminate()
        controller.communicate()


def _run_module(driver: Driver, way: Way, module: str) -> dict[str, str]:
    """Run the tests of one file; their output stays in out/guest-tests."""
    report = f"{_HOME}/{module}.xml"
    folder, command = "expect", ["expect", module]
    if "." not in module:
        driver.run("sh", "-c", _RESET, user="root")
        options = ("-p", "no:cacheprovider", "-q", "--tb=short", "--auto-config", "--no-color", f"--junitxml={report}")
        folder, command = "python", ["pytest-3", *options, f"tests/{module}.py"]
    environment = {"PATH": _PATH, "PYTHONPATH": "", **({"SBATCH_MURI": "1"} if way.marked else {})}
    done = driver.run("timeout", "--kill-after=60", str(_LONGEST_S), *command, chdir=f"{_HOME}/testsuite/{folder}",
                      env=environment, check=False, timeout_s=_LONGEST_S + 120)  # fmt: skip
    log = CHECKOUT / "out/guest-tests" / way.name / f"{module}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        stream.write(done.stdout + done.stderr)
    if folder == "expect":
        driver.cancel_all()
        return {module: {0: "passed", 255: "skipped"}.get(done.returncode, "failed")}
    written = driver.instance.root_of(CONTROLLER) / report.lstrip("/")
    if not written.exists():
        return {module: "error"}
    text = written.read_text(encoding="utf-8", errors="replace")
    written.unlink()
    return outcomes(text)


@dataclass(frozen=True)
class _Hosts:
    """The sandboxes of each way, and what came of the tests in them."""

    drivers: Mapping[tuple[Way, int], Driver]
    found: Found
    progress: Progress
    stop: Callable[[], None]

    def settle(self, modules: Sequence[str]) -> None:
        """Run test files in every way, and those again that differ."""
        self._run(modules, self.drivers)
        tests = {test for ran in self.found.values() for test in ran if _file_of(test) in modules and not cause(test)}
        differing = {test for test in tests if len({best(self.found, way, test) for way in WAYS}) > 1}
        again = sorted(set(map(_file_of, differing))) * _AGAIN
        self._run(again, {(way, 0): self.drivers[way, 0] for way in WAYS})

    def _run(self, modules: Sequence[str], drivers: Mapping[tuple[Way, int], Driver]) -> None:
        waiting = {way: queue.SimpleQueue[str]() for way in WAYS}
        for way, module in itertools.product(WAYS, modules):
            waiting[way].put(module)

        def work(host: tuple[tuple[Way, int], Driver]) -> None:
            (way, _), driver = host
            with suppress(queue.Empty):
                while module := waiting[way].get_nowait():
                    began = time.monotonic()
                    ended = _run_module(driver, way, module)
                    for test, outcome in ended.items():
                        self.found[way.name].setdefault(test, []).append(outcome)
                    seen = ", ".join(f"{count} {outcome}" for outcome, count in Counter(ended.values()).items())
                    self.progress.step(f"{way.name}: {module}: {seen} in {time.monotonic() - began:.0f} s")

        with ThreadPoolExecutor(len(drivers)) as pool:
            try:
                list(pool.map(work, drivers.items()))
            except BaseException:
                self.stop()  # which ends what the other sandboxes run
                raise


def run(tree: Tree, groups: Iterable[str], progress: Progress) -> dict[str, Any]:
    """Run groups of the tests of a source tree in every way, and those that differ again; return what came of it.

    Raises:
        UsageError: The tree has no such tests.
        SandboxError: A sandbox did not start, or a controller ended.
    """
    found: Found = {way.name: {} for way in WAYS}
    with ExitStack() as stack:
        source = Path(stack.enter_context(tempfile.TemporaryDirectory()), "slurm")
        export(tree, source)
        testsuite = source / "testsuite"
        in_expect, modules = modules_of(testsuite, groups)
        texts = {each: (testsuite / f"python/tests/{each}.py").read_text(encoding="utf-8") for each in modules}
        replaced = {each: sorted(set(words)) for each, text in texts.items() if (words := _REPLACED.findall(text))}
        suite = ensure_built(tree, progress)
        drivers = {
            (way, number): stack.enter_context(_host(f"guest-{index}-{number}", way, suite, testsuite, progress))
            for index, way in enumerate(WAYS)
            for number in range(_SANDBOXES)
        }
        hosts = _Hosts(drivers, found, progress, stack.close)
        hosts.settle(in_expect)
        for (way, _), driver in drivers.items():
            _hand_over(driver, way)
        hosts.settle(modules)
        released = Counter[str]()
        for (way, _), driver in drivers.items():
            log = driver.run("cat", _CONTROLLER_LOG, user="root", check=False).stdout
            released[way.name] += log.count(": released alone: ")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "slurm": tree.version, "commit": tree.commit, "date": today, "released": released, "replaced": replaced,
        "found": found,
    }  # fmt: skip


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def modules_of(testsuite: Path, groups: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the files of groups, such as 17, 116 or 116_33: those for expect, and those in Python.

    Raises:
        UsageError: There are none.
    """
    wanted = re.compile(rf"test_?({'|'.join(map(re.escape, groups))})([._].*)?")
    in_expect = [path.name for path in testsuite.glob("expect/test*") if re.fullmatch(r"test\d+\.\d+", path.name)]
    python = [path.stem for path in testsuite.glob("python/tests/test_*.py")]
    chosen = [sorted(filter(wanted.fullmatch, names)) for names in (in_expect, python)]
    if not any(chosen):
        raise UsageError("this source of Slurm has no such tests: the tags up to 25.05 hold them")
    return chosen[0], chosen[1]
