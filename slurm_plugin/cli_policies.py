"""The command `muri policies`: what can be put behind `policy:` in the configuration."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace

import click

from muri.policies.allocation.names import ALIASES, ORDERS, SYNERGY_NAMES
from muri.policies.registry import PolicyInfo, describe_policies, policy_problems


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def policies(as_json: bool) -> None:
    """List the policies: who goes first, whether jobs share GPUs, whether running ones may be stopped.

    Choose one with `policy:` in the configuration. The first is the default. Running jobs are only ever stopped if they
    can go on from a checkpoint. Some policies exist for comparisons in `muri simulate` only; baselines
    are there to compare others with, and no cluster gains by choosing one. Other distributions add
    policies by the entry point group "muri.policies".
    Exits with 1 when one of those cannot be used.

    \b
    Examples:
      muri policies
      muri policies --json | jq -r '.policies[] | select(.shares) | .name'
      muri policies --json | jq -r '.policies[].name' | grep synergy
    """
    infos, problems = describe_policies(), policy_problems()
    if as_json:
        click.echo(json.dumps({"policies": [asdict(info) for info in infos], "problems": problems}, indent=1))
    else:
        _print_table(infos)
    broken = (*(info.problem for info in infos if info.problem), *problems)
    for problem in broken:
        click.echo(f"muri: {problem}", err=True)
    if broken:
        raise click.exceptions.Exit(1)


def _print_table(infos: Iterable[PolicyInfo]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("POLICY", "GOES FIRST", "SHARES", "STOPS"):
        table.add_column(name, no_wrap=name != "GOES FIRST")
    table.add_column("WHAT IT DOES")
    for info in _one_order_of_each(infos):
        summary = "cannot be used, see below" if info.problem else info.summary
        origin = "" if info.source == "built-in" else f" ({info.source})"
        only = " (simulated only)" if info.simulated_only else " (baseline, for comparison)" if info.is_baseline else ""
        table.add_row(info.name, info.order or "?", _word(info.shares), _word(info.preempts), summary + origin + only)
    Console(highlight=False, markup=False).print(table)
    others = ", ".join(f"-{order}" for order in ORDERS[1:])
    click.echo(f"\nOf synergy-* there are other orders: put {others} behind the name.")


def _one_order_of_each(infos: Iterable[PolicyInfo]) -> Iterable[PolicyInfo]:
    """Of Synergy's policies only those with a short name, by that."""
    short = {name: alias for alias, name in ALIASES.items()}
    for info in infos:
        if info.name in short or info.name not in SYNERGY_NAMES:
            yield replace(info, name=short.get(info.name, info.name))


def _word(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"
