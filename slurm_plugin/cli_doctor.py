"""`muri doctor`."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from muri.slurm_plugin.cli import CONFIG_OPTION
from muri.slurm_plugin.doctor_checks import Finding, Level, exit_code

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "red"}
_INDENT = 26
_WIDTH = 80


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG_OPTION
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="Another profile store than its own.")
@click.option("--set-aside", is_flag=True, help="Rename the profile store, if it is damaged.")
@click.option("-y", "--yes", is_flag=True, help="With --set-aside: don't ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(config_file: Path | None, store: Path | None, set_aside: bool, yes: bool, as_json: bool) -> None:
    """Examine what Muri needs: configuration, state directory, profile store, journal, Slurm, GPUs, disk.

    Changes nothing without --set-aside. Exits with 1 when something has to be done; warnings alone
    give 0. Works where there is no Slurm, and says so.

    \b
    Examples:
      muri doctor
      muri doctor --json | jq '.findings[] | select(.level != "ok")'
      muri doctor --set-aside    rename a damaged store
    """
    from muri.slurm_plugin.doctor import examine

    logging.getLogger("muri").addHandler(logging.NullHandler())  # each warning is a finding here
    if set_aside:
        _set_aside(config_file, store, yes, as_json)
        return
    findings = []
    for finding in examine(config_file, store):
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        click.echo(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False))
    else:
        click.echo(_summary(findings))
    click.get_current_context().exit(exit_code(findings))


def _print(finding: Finding) -> None:
    head = click.style(f"{finding.level.upper():<9}", fg=_COLOURS[finding.level]) + f"{finding.name:<17}"
    space = " " * _INDENT
    text = click.wrap_text(finding.text, _WIDTH - _INDENT, preserve_paragraphs=True)
    click.echo(head + text.replace("\n", f"\n{space}"))
    if finding.remedy:
        click.echo(click.wrap_text(finding.remedy, _WIDTH, f"{space}→ ", f"{space}  "))


def _summary(findings: Sequence[Finding]) -> str:
    problems, warnings = (sum(item.level is level for item in findings) for level in (Level.PROBLEM, Level.WARNING))
    return f"{problems} problem(s), {warnings} warning(s)"


def _set_aside(config_file: Path | None, store: Path | None, yes: bool, as_json: bool) -> None:
    from muri.slurm_plugin.doctor import set_store_aside
    from muri.slurm_plugin.setup import profiles_path, read_config

    refused: list[str] = []

    def confirm(question: str) -> bool:
        if yes or click.confirm(question, err=True):
            return True
        refused.append(question)
        return False

    config = read_config(config_file)
    place = set_store_aside(config, store, confirm)
    if as_json:
        click.echo(json.dumps({"set_aside": None if place is None else str(place)}))
    elif place is not None:
        click.echo(f"set aside as {place}; save what is left of it with `sqlite3 {place} .recover`")
    elif not refused:
        click.echo(f"{store or profiles_path(config)} is whole; nothing to set aside")
    if refused:
        click.echo("Nothing was changed.", err=True)
        click.get_current_context().exit(1)
