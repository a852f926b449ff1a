"""The command line of the sandbox."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from sandbox import cluster, guest, host, instance, lifecycle, releases
from sandbox.builds import USERS
from sandbox.cluster import SUITES, Shape
from sandbox.driver import Driver
from sandbox.init import HIERARCHIES
from sandbox.releases_page import PAGE, TESTS, Release, outcome_of_tests, page, releases_on, with_column
from sandbox.source import ensure_built, find_tree, suite_named
from sandbox.support import CONTROLLER, InstancePaths, Progress, SandboxError, UsageError

_EPILOG = """examples:
  muri-sandbox up                                   start a cluster (minutes the first time, then seconds)
  muri-sandbox run sinfo                            run a command in it as alice
  muri-sandbox run --user root -- scontrol show job 1
  muri-sandbox run -- sbatch --gres=gpu:1 --wrap='echo $CUDA_VISIBLE_DEVICES'
  muri-sandbox shell --user bob                     an interactive shell
  muri-sandbox up --name second --suite bookworm    another one beside it, with Slurm 22.05 (trixie: 24.11)
  muri-sandbox up --name third --accounting         another one with accounts, QOS and limits
  muri-sandbox up --name fourth --site              another one like a site: a login host, nodes of their own, munge
  muri-sandbox run --name fourth --on login sinfo
  muri-sandbox build                                only build what later starts need, for all suites
  muri-sandbox down                                 end it; nothing is left but the cache
The cache is $MURI_CACHE (default ~/.cache/muri); deleting its folder `sandbox` frees the space.
"""


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="muri-sandbox",
        description="A real Slurm cluster of virtual nodes with stand-in GPUs on this machine.",
        epilog=_EPILOG, formatter_class=formatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def add(name: str, text: str, handler: Callable[[argparse.Namespace], int],
            named: bool = True) -> argparse.ArgumentParser:  # fmt: skip
        command = commands.add_parser(name, help=text, description=text, epilog=_EPILOG, formatter_class=formatter)
        command.set_defaults(handler=handler, name="default")
        if named:
            command.add_argument("--name", default="default", help="which sandbox (default: %(default)s)")
        return command

    _add_up_options(add("up", "Start a sandbox, building what is missing.", _up))
    build = add("build", "Build what is missing for later starts; starts nothing.", _build, named=False)
    build.add_argument("--suite", action="append", default=[],
                       help=f"{' or '.join(SUITES)}; may be repeated (default: all)")  # fmt: skip
    build.add_argument("--from-source", type=Path, metavar="DIR",
                       help="build the Slurm whose source tree or Git repository this is; "
                            "`up --suite source-25.11` starts it")  # fmt: skip
    build.add_argument("--release", metavar="TAG", action="append", default=[],
                       help="with --from-source: a tag or commit of the repository; may be repeated")  # fmt: skip
    add("down", "End a sandbox and remove everything of it but the cache.", _down)
    status = add("status", "Say whether a sandbox is up, and what is in it.", _status)
    status.add_argument("--json", action="store_true", help="print JSON")
    for name, text, handler in (
        ("shell", "Open a shell in a sandbox.", _shell),
        ("run", "Run a command in a sandbox; its exit code is passed on.", _run),
    ):
        command = add(name, text, handler)
        command.add_argument("--user", default="alice", help="root, alice or bob (default: %(default)s)")
        command.add_argument("--on", default=CONTROLLER, metavar="HOST",
                             help="on a site also login, n1, … (default: %(default)s)")  # fmt: skip
        if name == "run":
            command.add_argument("--env", action="append", default=[], metavar="NAME=VALUE",
                                 help="an environment variable for the command; may be repeated")  # fmt: skip
            command.add_argument("--chdir", metavar="DIR", help="working directory inside (default: this one)")
            command.add_argument("cmd", nargs=argparse.REMAINDER, metavar="CMD…", help="the command")
    matrix = add(
        "matrix", "Try on each release what Muri depends on, and write docs/releases.md.", _matrix, named=False
    )
    matrix.add_argument("--suite", action="append", default=[],
                        help=f"{' or '.join(SUITES)}, or such as source-25.11; may be repeated "
                             "(default: those of Debian)")  # fmt: skip
    matrix.add_argument("--tests", type=Path, metavar="FILE",
                        help="with one --suite: instead of trying it, enter pytest's report (--junitxml) of "
                             "the sandbox tests on it")  # fmt: skip
    guest = add("guest-tests", "Run Slurm's own tests without Muri, beside it, and with all batch jobs marked.", _guest,
                named=False)  # fmt: skip
    guest.add_argument("--from-source", type=Path, metavar="DIR", required=True, help="Slurm's Git repository or tree")
    guest.add_argument("--release", metavar="TAG", default="", help="a tag or commit of the repository")
    guest.add_argument("--groups", metavar="N,…", default="",
                       help="numbers of tests, such as 105,116_33; then nothing is stored "
                            "(default: all that concern Muri)")  # fmt: skip
    guest.add_argument("--json", action="store_true", help="print JSON")
    add("restart-controller", "Restart slurmctld, which keeps its state.", _restart_controller)
    return parser


def _add_up_options(parser: argparse.ArgumentParser) -> None:
    shape = Shape()
    parser.add_argument("--suite", default="forky", help=f"{' or '.join(SUITES)} (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=shape.nodes, help="default: %(default)s")
    parser.add_argument("--gpus-per-node", type=int, default=shape.gpus_per_node, help="default: %(default)s")
    parser.add_argument("--cpus-per-node", type=int, default=shape.cpus_per_node,
                        help="virtual CPUs, bookkeeping only (default: %(default)s)")  # fmt: skip
    parser.add_argument("--partition", action="append", default=[], metavar="NAME=NODES[:N]",
                        help="a partition beside main, such as small=n[1-2]; with N, that many jobs that ask for it "
                             "may share a CPU (default: 8, 1: none); may be repeated")  # fmt: skip
    parser.add_argument("--accounting", action="store_true",
                        help="with a database, accounts, QOS, limits and node features")  # fmt: skip
    parser.add_argument("--site", action="store_true",
                        help="like a site: accounting, a login host, hosts with file systems of their own, munge, "
                             "SlurmUser=slurm, typed GPUs, a reservation")  # fmt: skip
    parser.add_argument("--constrain-devices", nargs="?", choices=HIERARCHIES, const="v1", default="",
                        help="a site's jobs can open the GPUs that they were given and no others, by cgroups of "
                             "version 1 (if none is said) or 2")  # fmt: skip
    parser.add_argument("--cloud-nodes", type=int, default=shape.cloud_nodes, metavar="N",
                        help="nodes of 8 GPUs without a slurmd beside the others, to try a large cluster with "
                             "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--island-gpus", type=int, default=shape.island_gpus, metavar="N",
                        help="GPUs that gres.conf says are linked with each other (default: none)")  # fmt: skip
    parser.add_argument("--bare", action="store_true", help="with nothing of Muri, to try an installation")


def _build(options: argparse.Namespace) -> int:
    progress = Progress()
    if options.release and not options.from_source:
        raise UsageError("--release is a tag of a source repository: name that with --from-source DIR")
    if options.from_source and options.suite:
        raise UsageError("--suite and --from-source exclude each other")
    if options.from_source:
        trees = [find_tree(options.from_source, release) for release in options.release or [""]]
        suites = [ensure_built(tree, progress) for tree in trees]
    else:
        suites = [suite_named(name) for name in options.suite or SUITES]
    for suite in suites:
        built, pyslurm = lifecycle.build(suite, progress)
        has = "with pyslurm" if pyslurm.directory else f"without pyslurm: {pyslurm.reason}"
        print(f"{suite.name}: Slurm {built.slurm_version}, {has}.")
    return 0


def _up(options: argparse.Namespace) -> int:
    shape = cluster.with_partitions(
        Shape(
            options.nodes,
            options.gpus_per_node,
            options.cpus_per_node,
            accounting=options.accounting or options.site,
            site=options.site,
            bare=options.bare,
            constrained=options.constrain_devices,
            cloud_nodes=options.cloud_nodes,
            island_gpus=options.island_gpus,
        ),
        options.partition,
    )
    progress = Progress()
    started, fresh = lifecycle.up(options.name, suite_named(options.suite), shape, progress)
    gpus = started.nodes * started.gpus_per_node
    state = f"up after {progress.elapsed_s:.1f} s" if fresh else "already up"
    print(f"The sandbox {started.name!r} is {state}: Slurm {started.slurm_version} ({started.suite}), "
          f"{started.nodes} nodes, {gpus} GPUs.")  # fmt: skip
    return 0


def _down(options: argparse.Namespace) -> int:
    existed = lifecycle.down(options.name, Progress())
    print(f"The sandbox {options.name!r} is {'down' if existed else 'not up; nothing to do'}.")
    return 0


def _status(options: argparse.Namespace) -> int:
    found = instance.load(options.name)
    up = found is not None and found.alive
    if options.json:
        document = found.to_dict() if found and up else {"name": options.name}
        print(json.dumps({**document, "up": up, "all": instance.names()}, indent=1))
    elif found and up:
        print(f"{found.name}: {found.phase} since {found.started_utc}, Slurm {found.slurm_version} "
              f"({found.suite}), {found.nodes} nodes × {found.gpus_per_node} GPUs")  # fmt: skip
        parts = {
            "pyslurm": found.pyslurm,
            "SPANK plugin": found.spank,
            "job_submit": found.job_submit,
            "accounting": found.accounting,
            "hosts of their own": bool(found.hosts),
        }
        for label, there in parts.items():
            print(f"  {label}: {'yes' if there else 'no'}")
    else:
        print(f"The sandbox {options.name!r} is not up.")
    return 0 if up else 3


def _variables(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if not text.partition("=")[1] or text.startswith("="):
            raise UsageError(f"--env {text!r} is malformed: write NAME=VALUE")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _enter(options: argparse.Namespace, command: list[str], chdir: str | None = None,
           variables: dict[str, str] | None = None) -> int:  # fmt: skip
    if options.user not in {"root", *USERS}:
        raise UsageError(f"--user {options.user!r} is unknown: choose one of root, {', '.join(USERS)}")
    line = instance.command_line(instance.require(options.name), options.user, command, chdir, variables, on=options.on)
    sys.stdout.flush()
    os.execvp(line[0], line)


def _shell(options: argparse.Namespace) -> int:
    return _enter(options, ["/bin/bash", "-i"])


def _run(options: argparse.Namespace) -> int:
    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        raise UsageError("run needs a command, for example `muri-sandbox run sinfo`")
    return _enter(options, command, options.chdir, _variables(options.env))


def _matrix(options: argparse.Namespace) -> int:
    if options.tests and len(options.suite) != 1:
        raise UsageError("--tests is the report of one suite: name that with --suite")
    progress = Progress()
    for name in options.suite or SUITES:
        suite = suite_named(name)
        if options.tests:
            found = next((column for column in _columns() if column.suite == suite.name), None)
            if found is None:
                raise UsageError(f"--tests: {PAGE} has no column of {suite.name}; make it first, without --tests")
            found = replace(found, answers={**found.answers, TESTS: outcome_of_tests(options.tests)})
        else:
            found = releases.examine_suite(suite, progress)
        _write_page(with_column(_columns(), found))
        failed = [question for question, answer in found.answers.items() if not answer.works]
        print(f"{found.head}: {len(found.answers) - len(failed)} of {len(found.answers)} work; {PAGE} has its column")
    return 0


def _columns() -> list[Release]:
    return releases_on(PAGE.read_text(encoding="utf-8"))


def _write_page(columns: Sequence[Release]) -> None:
    report = guest.report(json.loads(guest.RESULT.read_text(encoding="utf-8")))
    PAGE.write_text(page(columns, [TESTS, *releases.PROBES], report), encoding="utf-8")


def _guest(options: argparse.Namespace) -> int:
    groups = options.groups.split(",") if options.groups else guest.GROUPS
    result = guest.run(find_tree(options.from_source, options.release), groups, Progress())
    text = json.dumps(result, indent=1, sort_keys=True)
    if not options.groups:
        guest.RESULT.write_text(f"{text}\n", encoding="utf-8")
        _write_page(_columns())
    print(text if options.json else guest.report(result))
    return 0 if all(map(guest.cause, guest.differences(result["found"]))) else 1


def _restart_controller(options: argparse.Namespace) -> int:
    Driver.of(options.name).restart_controller()
    print(f"slurmctld of the sandbox {options.name!r} has restarted.")
    return 0


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        InstancePaths(options.name)
        host.require_root()
        code: int = options.handler(options)
    except SandboxError as err:
        print(f"muri-sandbox: {err}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt:
        print("muri-sandbox: interrupted; what was begun has been cleaned up", file=sys.stderr)
        return 130
    return code
