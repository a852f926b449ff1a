"""Slurm's own tests as a guest: the same ones without Muri, beside Muri, and with each batch job marked for it."""

import datetime
import queue
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final
from xml.etree import ElementTree

from sandbox import lifecycle
from sandbox.builds import ensure_rootfs
from sandbox.cluster import Shape, Suite, cluster_name
from sandbox.driver import Driver
from sandbox.source import Tree, ensure_built, export
from sandbox.support import CHECKOUT, CONTROLLER, Progress, SandboxError, UsageError

RESULT: Final = CHECKOUT / "lab/muri_lab/benchmarks/results/guest-tests.json"

#: Slurm's numbers of the commands and features that Muri touches.
GROUPS: Final = {
    "103": "salloc", "105": "sbatch", "107": "scancel", "108": "scontrol", "114": "squeue", "116": "srun",
    "121": "MPS and shards", "122": "job arrays", "123": "reservations", "124": "accounts", "126": "partitions' limits",
    "127": "Epilog", "128": "preemption", "130": "priorities", "132": "Prolog", "135": "TaskEpilog",
    "136": "specialized cores", "138": "many commands", "139": "steps' GPUs", "140": "TRES", "141": "nodes of a cloud",
    "144": "GRES", "145": "constraints", "146": "limits of partitions", "147": "SPANK",
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

_HOME: Final = "/opt/slurm-tests"
_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: As docs/install.md says.
_OF_MURI: Final = "GresTypes=gpu,muri\nLicenses=muri_gate:1000000\nJobSubmitPlugins=lua\nCliFilterPlugins=lua"

#: The tests start and end the daemons themselves, and change Slurm's files and database by sudo.
_PREPARE: Final = f"""
set -eu
echo 'alice ALL=(ALL:ALL) NOPASSWD: ALL' > /etc/sudoers.d/alice
mariadb --execute "ALTER USER root@localhost IDENTIFIED BY ''; DROP DATABASE slurm_acct_db"
pkill -x slurmctld; pkill -x slurmd; pkill -x slurmdbd
while pgrep -x 'slurmctld|slurmd|slurmdbd' >/dev/null; do sleep 0.1; done
rm -rf /var/spool/slurmctld/* /etc/slurm/gres.conf
mkdir -p /var/log/slurm
[ -e /usr/lib/slurm ] || ln -s "/usr/lib/$(gcc -print-multiarch)/slurm" /usr/lib/slurm
printf '%s\\n' 'SlurmSourceDir = {_HOME}' 'SlurmBuildDir = {_HOME}/build' 'SlurmInstallDir = /usr' \
    'SlurmConfigDir = /etc/slurm' > {_HOME}/testsuite/testsuite.conf
chown -R alice {_HOME}
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

#: How often the tests that do not end alike are run again, with nothing beside them.
_AGAIN: Final = 2

#: From the best to the worst; of a test's outcomes in one way the best counts.
OUTCOMES: Final = ("passed", "skipped", "failed", "error")

#: What tests came to: by way and test one of `OUTCOMES` for each time.
Found = dict[str, dict[str, list[str]]]


def outcomes(junit: str) -> dict[str, str]:
    """Return what became of each test of a report in JUnit's format, by module and test."""
    found: dict[str, str] = {}
    words = {"skipped": "skipped", "failure": "failed", "error": "error"}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        module = case.get("classname", "").rpartition(".")[2]
        name = f"{module}::{case.get('name')}" if module else case.get("name", "").rpartition(".")[2]
        told = [found.get(name, "passed"), *(words[each.tag] for each in case if each.tag in words)]
        found[name] = max(told, key=OUTCOMES.index)  # a teardown that fails has a case of its own
    return found


def best(found: Found, way: Way, test: str) -> str:
    """Return the best outcome of a test in one way, "" if it did not run."""
    return min(found[way.name].get(test, []), key=OUTCOMES.index, default="")


def differences(found: Found) -> list[str]:
    """Return the tests that pass without Muri, and never with it in one of the other ways."""
    passed = (test for test in sorted(found[WITHOUT.name]) if best(found, WITHOUT, test) == "passed")
    return [test for test in passed if any(best(found, way, test) != "passed" for way in WAYS)]


def chances(found: Found) -> list[str]:
    """Return the tests that do not always end alike in one and the same way."""
    return sorted({test for ran in found.values() for test, seen in ran.items() if len(set(seen)) > 1})


def table(found: Found) -> str:
    """Return the counts of each group, in Markdown."""
    lines = [f"| group | {' | '.join(way.name for way in WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    tests = sorted({test for ran in found.values() for test in ran})
    groups = sorted({test.split("_")[1] for test in tests})
    for group, chosen in [*((each, [test for test in tests if test.split("_")[1] == each]) for each in groups),
                          ("all", tests)]:  # fmt: skip
        cells = []
        for way in WAYS:
            counted = Counter(best(found, way, test) for test in chosen)
            cells.append(" / ".join(str(counted[outcome]) for outcome in ("passed", "failed", "skipped", "error")))
        lines.append(f"| {group} {GROUPS.get(group, '')} | {' | '.join(cells)} |".replace("  |", " |"))
    return "\n".join(lines)


def report(result: Mapping[str, Any]) -> str:
    """Return the figures of a run and its differences, in Markdown."""
    found: Found = result["found"]
    parts = (
        f"Slurm {result['slurm']}, {result['date']}: tests passed / failed / skipped / with an error. Beside Muri "
        f"{result['released'][WAYS[1].name]} jobs waited for Muri, all marked {result['released'][WAYS[2].name]}.",
        table(found),
        f"By chance: {', '.join(f'`{test}`' for test in chances(found)) or 'none'}.",
        f"Only without Muri: {', '.join(f'`{test}`' for test in differences(found)) or 'none'}.",
    )
    return "\n\n".join(parts)


@contextmanager
def _host(name: str, way: Way, suite: Suite, testsuite: Path, progress: Progress) -> Iterator[Driver]:
    """A sandbox in which the tests can run."""
    instance, _ = lifecycle.up(name, suite, Shape(nodes=1, accounting=True, bare=not way.muri), progress)
    try:
        driver, root = Driver(instance), instance.root_of(CONTROLLER)
        with _controller(driver) if way.muri else nullcontext():
            home = root / _HOME.lstrip("/")
            shutil.copytree(testsuite, home / "testsuite", symlinks=True)
            (home / "build").mkdir()
            shutil.copy(ensure_rootfs(suite, progress).directory / "config.h", home / "build")
            driver.run("sh", "-c", _PREPARE, user="root")
            text = (CHECKOUT / "etc/sandbox/guest.conf").read_text(encoding="utf-8")
            gres = _OF_MURI if way.muri else "GresTypes=gpu"
            config = Template(text).substitute(cluster=cluster_name(name), muri=gres)
            (root / "etc/slurm/slurm.conf").write_text(config, encoding="utf-8")
            yield driver
    finally:
        lifecycle.down(name, progress)


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
    """Run the tests of one file; what pytest printed stays in out/guest-tests."""
    driver.run("sh", "-c", _RESET, user="root")
    report = f"{_HOME}/{module}.xml"
    command = (
        "timeout", "--kill-after=60", str(_LONGEST_S), "pytest-3", "-p", "no:cacheprovider", "-q", "--tb=short",
        "--auto-config", "--no-color", f"--junitxml={report}", f"tests/{module}.py",
    )  # fmt: skip
    environment = {"PATH": _PATH, "PYTHONPATH": "", **({"SBATCH_MURI": "1"} if way.marked else {})}
    done = driver.run(*command, chdir=f"{_HOME}/testsuite/python", env=environment, check=False,
                      timeout_s=_LONGEST_S + 120)  # fmt: skip
    log = CHECKOUT / "out/guest-tests" / way.name / f"{module}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        stream.write(done.stdout + done.stderr)
    written = driver.instance.root_of(CONTROLLER) / report.lstrip("/")
    if not written.exists():
        return {module: "error"}
    text = written.read_text(encoding="utf-8", errors="replace")
    written.unlink()
    return outcomes(text)


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
        modules = _modules(testsuite / "python/tests", groups)
        suite = ensure_built(tree, progress)
        hosts = {
            (way, number): stack.enter_context(_host(f"guest-{index}-{number}", way, suite, testsuite, progress))
            for index, way in enumerate(WAYS)
            for number in range(_SANDBOXES)
        }
        waiting = {way: queue.SimpleQueue[str]() for way in WAYS}

        def work(way: Way, driver: Driver) -> None:
            with suppress(queue.Empty):
                while module := waiting[way].get_nowait():
                    began = time.monotonic()
                    ended = _run_module(driver, way, module)
                    for test, outcome in ended.items():
                        found[way.name].setdefault(test, []).append(outcome)
                    seen = ", ".join(f"{count} {outcome}" for outcome, count in Counter(ended.values()).items())
                    progress.step(f"{way.name}: {module}: {seen} in {time.monotonic() - began:.0f} s")

        for way in WAYS:
            for module in modules:
                waiting[way].put(module)
        with ThreadPoolExecutor(len(hosts)) as pool:
            try:
                list(pool.map(lambda host: work(host[0][0], host[1]), hosts.items()))
            except BaseException:
                stack.close()  # which ends what the other sandboxes run
                raise
        tests = {test for ran in found.values() for test in ran}
        differing = {test for test in tests if len({best(found, way, test) for way in WAYS}) > 1}
        for module in sorted({test.partition("::")[0] for test in differing}) * _AGAIN:
            for way in WAYS:
                waiting[way].put(module)
                work(way, hosts[way, 0])
        released = Counter[str]()
        for (way, _), driver in hosts.items():
            log = driver.run("cat", _CONTROLLER_LOG, user="root", check=False).stdout
            released[way.name] += log.count(": released alone: ")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"slurm": tree.version, "commit": tree.commit, "date": today, "released": released, "found": found}


def _modules(tests: Path, groups: Iterable[str]) -> list[str]:
    """Return the test files of groups, such as 116 or 116_33."""
    names = sorted(path.stem for path in tests.glob("test_*.py"))
    chosen = [name for name in names if any(f"{name}_".startswith(f"test_{group}_") for group in groups)]
    if not chosen:
        raise UsageError("this source of Slurm has no such tests: the tags up to 25.05 hold testsuite/python")
    return chosen
