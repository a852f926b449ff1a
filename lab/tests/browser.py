"""A page in a real headless Chromium: its DOM, console and network requests."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0",
    "--virtual-time-budget=10000",
)  # fmt: skip
NOBODY = "not an origin"  # Who asks for what the browser wants for itself, like its own updates


@dataclass(frozen=True)
class Visit:
    """A browser's view of a page."""

    dom: str  # The document after its scripts have run
    console: tuple[str, ...]  # Messages and errors
    requests: tuple[str, ...]  # Addresses that the page asked for, refused ones too


def visit(page: Path, folder: Path, *flags: str) -> Visit:
    """Open a page; the folder is for the browser's own files."""
    net_log = folder / "net.json"
    done = _chromium(folder, f"--log-net-log={net_log}", *flags, "--dump-dom", page.as_uri())
    console = tuple(re.findall(r"CONSOLE[^\]]*\] (.*)", done.stderr))
    return Visit(done.stdout, console, _requests(net_log))


def screenshot(page: Path, image: Path, *flags: str) -> None:
    """Draw a page into a PNG file beside which the browser's own files go."""
    _chromium(image.parent, *flags, f"--screenshot={image}", page.as_uri())


def _chromium(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail("there is no Chromium; run scripts/install-chromium")
    command = [found, *FLAGS, f"--user-data-dir={folder / 'browser'}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def _requests(net_log: Path) -> tuple[str, ...]:
    log = json.loads(net_log.read_text())
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event["params"] for event in log["events"] if event["type"] == start and "params" in event]
    return tuple(one["url"] for one in started if "url" in one and one.get("initiator", NOBODY) != NOBODY)
