"""The command `muri top`: a live view of the groups on this node."""

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.live import Live

from muri.launcher.telemetry.top_render import SORTS, render
from muri.launcher.telemetry.top_source import GroupView, NoGroupError, find_groups, read_group

NARROWEST: Final = 80

EPILOG = """
\b
Examples:
  muri top                                      groups of yours on this node
  srun --overlap --pty --jobid=4711 muri top    on the node of host job 4711
  muri top --once --sort wait                   once, most hindered first
  muri top --json | jq '.[].total_speed'
  muri top --file status.json                   of a runtime started by hand

\b
SPEED is iterations done × iteration time alone / time elapsed: 1.00 is as
fast as alone; ~ where the time alone is not known but learnt. PLAN is what
the controller expected; ! marks a difference above 20 %. "process" in STATE:
running, in a process of its own. The last line of a group shows for how much
of the time each resource is held, and by whom at this moment.
"""


@click.command(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EPILOG)
@click.option("--file", "files", type=click.Path(path_type=Path), multiple=True, help="Status file to show.")
@click.option("--once", is_flag=True, help="Print once and end; also where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print the groups' status files as one JSON list, once.")
@click.option("--interval", type=click.FloatRange(0.2, 3600), default=1.0, show_default=True, help="Seconds.")
@click.option("--sort", type=click.Choice(SORTS), default="job", show_default=True, help="Order of the members.")
def top(files: tuple[Path, ...], once: bool, as_json: bool, interval: float, sort: str) -> None:
    """Watch the groups on this node: iterations, stages, speed against the plan.

    Shows your own groups; root sees those of all users. Leave with q or Ctrl-C.
    """

    def look() -> list[GroupView]:
        return [read_group(path) for path in files] if files else find_groups(os.environ)

    if as_json:
        click.echo(json.dumps([group.to_json() for group in look()], indent=1))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(NARROWEST, console.width))
    if once or not console.is_terminal:
        console.print(render(look(), sort))
        return
    _watch(console, look, interval, sort)


def _watch(console: Console, look: Callable[[], list[GroupView]], interval_s: float, sort: str) -> None:
    """Redraw until a key or Ctrl-C; a group that ends leaves a line, and one that comes is shown."""
    first = look()
    with _single_keys() as pressed, Live(render(first, sort), console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        with contextlib.suppress(KeyboardInterrupt):
            while pressed(interval_s) not in {"q", "Q", "\x03"}:
                try:
                    live.update(render(look(), sort), refresh=True)
                except NoGroupError:
                    live.update("The last group has ended. q to leave.", refresh=True)


@contextlib.contextmanager
def _single_keys() -> Iterator[Callable[[float], str]]:
    """Keys without Enter; where standard input is no terminal only the time passes."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds) or ""  # type: ignore[func-returns-value]
        return
    import termios  # (only on terminals)
    import tty

    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield (
            lambda seconds: (
                os.read(file, 1).decode(errors="replace") if select.select([file], [], [], seconds)[0] else ""
            )
        )
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)
