"""Figures of benchmarks: the machine of a measurement, and the bars that figures have to reach."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click


def describe_machine() -> dict[str, object]:
    """CPU, cores, Python, and the commit with "+" when files differ from it."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
    }


def peak_rss_mib() -> float:
    """Most memory that this process ever held."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def measured(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """CPU seconds of some work, its own figures, and the process's memory."""
    start_s = time.process_time()
    own = work() or {}
    return {"cpu_s": round(time.process_time() - start_s, 3), "peak_rss_mib": peak_rss_mib(), **own}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure that has to reach something."""

    case: str
    what: str
    measured: float
    needed: str
    passed: bool

    def __str__(self) -> str:
        """The verdict, in a line."""
        return f"{'pass' if self.passed else 'FAIL'}  {self.case}: {self.what}: {self.measured:g} ({self.needed})"


def tell(text: str) -> None:
    """Progress, for people."""
    click.echo(text, err=True)


def keep(result: Path, cases: Mapping[str, dict[str, Any]], found: Iterable[Bar]) -> None:
    """Replace the measured cases in a file of results, and leave the others with the machine they were measured on."""
    bars = tuple(found)
    stored = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    load = round(os.getloadavg()[0], 1)
    for name, figures in cases.items():
        own = [asdict(bar) for bar in bars if bar.case == name]
        stored[name] = {"machine": describe_machine() | {"load_1min": load}, "figures": figures, "bars": own}
    result.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def verdict(found: Iterable[Bar]) -> int:
    """Tell every bar, and how the command is to end: with 0 if all are reached, else with 1."""
    bars = tuple(found)
    for bar in bars:
        tell(str(bar))
    return 0 if all(bar.passed for bar in bars) else 1


def finish(
    result: Path, cases: Mapping[str, dict[str, Any]], found: Iterable[Bar], *, stored: bool, as_json: bool
) -> NoReturn:
    """Keep and print what was asked for, and end the command with its verdict."""
    bars = tuple(found)
    if stored:
        keep(result, cases, bars)
    if as_json:
        click.echo(json.dumps({"cases": cases, "bars": [asdict(bar) for bar in bars]}, indent=1, ensure_ascii=False))
    sys.exit(verdict(bars))
