"""The command line of scripts/build-packages."""

import argparse
import shutil
import sys
from pathlib import Path

from sandbox import host, packages
from sandbox.builds import ensure_rootfs
from sandbox.cluster import SUITES
from sandbox.source import suite_named
from sandbox.support import CHECKOUT, Progress, SandboxError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/build-packages", description="Build Muri's packages.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all)")
    parser.add_argument(
        "--kind", action="append", choices=("deb", "rpm", "srpm", "dsc"), help="may be repeated (default: deb, rpm)"
    )
    parser.add_argument("--revision", type=int, default=1, help="the part of the version behind the hyphen")
    parser.add_argument("--python", default="", help="of source packages, such as python3.12 (default: the suite's)")
    parser.add_argument("--into", type=Path, default=CHECKOUT / "out/packages", help="default: %(default)s")
    return parser


def main() -> int:
    """Build the packages and copy them to where people look; returns the exit code."""
    options = _parser().parse_args()
    if options.python and not {*(options.kind or ("deb",))} <= {"srpm", "dsc"}:
        _parser().error("--python is for the kinds srpm and dsc: others have the Python of their suite")
    progress = Progress()
    try:
        host.require_root()
        for suite in [suite_named(name) for name in options.suites or SUITES]:
            build = ensure_rootfs(suite, progress)
            built = packages.ensure_packages(
                build, options.kind or ("deb", "rpm"), options.revision, progress, options.python
            )
            target = options.into / suite.name
            target.mkdir(parents=True, exist_ok=True)
            for old in target.glob("muri[-_]*"):
                old.unlink()
            for file in sorted(built.glob("muri[-_]*")):
                print(shutil.copy(file, target / file.name))
    except SandboxError as err:
        print(f"build-packages: {err}", file=sys.stderr)
        return err.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
