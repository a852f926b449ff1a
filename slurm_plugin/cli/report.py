"""The command `muri report`: the effect of sharing on one job, or on all jobs of a month."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from muri.errors import UsageError
from muri.profiler.records import STAGES

if TYPE_CHECKING:
    from muri.slurm_plugin.gateway.accounting import Accounting
    from muri.slurm_plugin.records.usage import JobUse, Run, Sums

_HOUR_S: Final = 3600.0

_TIMEOUT_S: Final = 600.0
"""A month of a large site takes sacct minutes."""

_LOOKUPS: Final = 3
"""From a job to its pilot job, and from there to the other members."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="[JOB]", required=False)
@click.option("--month", metavar="YYYY-MM", help="Jobs that ended in this month. [default: this month]")
@click.option("--user", help="Only this user's jobs. [default: yours; as root those of all users]")
@click.option("--jobs", "each_job", is_flag=True, help="One line for each job in place of sums.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(name: str | None, month: str | None, user: str | None, each_job: bool, as_json: bool) -> None:
    """Say what sharing did for JOB, or sum up a month's jobs by user, account and QOS.

    Reads Slurm's accounts (sacct), on any host. BILLED is the GPU time of Slurm's records: a member's own holds no
    GPU, its group's pilot job does. HAD splits the pilot jobs' GPU time among their members. ALONE is the GPU time that
    members would have needed alone, SAVED the difference to HAD. Both are sums over members whose iterations were
    counted and whose model was measured; the table says how many it leaves out. ~ marks an estimate.

    \b
    Examples:
      muri report 4711
      muri report 4711_3                 one task of a job array
      muri report --month 2026-11
      muri report --month 2026-11 --jobs --json | jq '.[] | select(.account == "hep")'
    """
    from muri.slurm_plugin.gateway.accounting import Accounting
    from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands

    accounting = Accounting(SlurmCommands(_TIMEOUT_S))
    if name is None:
        begin, end = _period(month)
        whose = [f"--user={user}"] if user else ["--allusers"] if os.geteuid() == 0 else []
        form = "%Y-%m-%dT%H:%M:%S"
        runs = _completed(accounting.runs_between(begin.strftime(form), end.strftime(form), whose), accounting)
        print_runs = _print_jobs if each_job else _print_sums
        print_runs(runs, (begin.timestamp(), end.timestamp()), user, as_json=as_json)
    elif month or user or each_job:
        raise UsageError("with a JOB only --json makes sense")
    else:
        _print_job(name, accounting, as_json=as_json)


def _period(month: str | None) -> tuple[datetime, datetime]:
    """Return the begin of a month and of the next one, in this host's time zone, as sacct counts."""
    month = month or f"{datetime.now().astimezone():%Y-%m}"
    if not re.fullmatch(r"20[0-9]{2}-(0[1-9]|1[0-2])", month):
        raise UsageError(f"--month {month!r} is not a month: write it as 2026-11")
    begin = datetime(int(month[:4]), int(month[5:]), 1).astimezone()
    year, following = divmod(begin.year * 12 + begin.month, 12)
    return begin, datetime(year, following + 1, 1).astimezone()


def _completed(runs: list["Run"], accounting: "Accounting") -> list["Run"]:
    """Add the records without which GPU time cannot be split: pilot jobs, and members that ended earlier."""
    from muri.slurm_plugin.records.usage import missing_runs

    asked: set[int] = set()
    for _ in range(_LOOKUPS):
        missing = missing_runs(runs) - asked
        if not missing:
            break
        asked |= missing
        runs = runs + accounting.runs_of(missing)
    return runs


def _print_job(name: str, accounting: "Accounting", *, as_json: bool) -> None:
    from muri.slurm_plugin.records.usage import uses_of
    from muri.terminal import say

    if not re.fullmatch(r"[1-9][0-9]{0,9}(_[0-9]{1,9})?", name):
        raise UsageError(f"{name!r} is not a job id. Use 12, or 12_3 for an array task")
    own = accounting.runs_of([name])
    if not own:
        raise UsageError(f"the accounts have no job {name}, or you may not see it (sacct --jobs={name})")
    if own[-1].is_own:
        members = " and ".join(map(str, own[-1].held_for or ()))
        its = f"it held GPUs for {members}: ask for one of them" if members else "ask for a user's job"
        raise UsageError(f"job {name} is one of Muri's own; {its}")
    meant = {run.job_id for run in own}
    uses = [use for use in uses_of(_completed(own, accounting)) if use.run.job_id in meant]
    if not uses:
        raise UsageError(f"job {name} has not run to an end yet ({own[-1].state}); meanwhile: muri explain {name}")
    if as_json:
        click.echo(json.dumps([as_record(use) for use in uses], indent=1))
        return
    within_min = _figures_within_min() if any(use.awaits_report for use in uses) else 0
    runs = Counter(use.run.job_id for use in uses)
    printed: Counter[int] = Counter()
    for use in uses:
        if printed:
            click.echo()
        printed[use.run.job_id] += 1
        if runs[use.run.job_id] > 1:
            click.echo(f"Run {printed[use.run.job_id]} of {runs[use.run.job_id]}:")
        for line in described(use, within_min):
            say(line)


def _figures_within_min() -> int:
    """Return the minutes from a member's end until its report is written, by this host's configuration."""
    from muri.slurm_plugin.config import config_path, load_config
    from muri.slurm_plugin.records.usage import PILOT_REPORTS_AWAITED

    config = load_config(config_path(None))
    return math.ceil((PILOT_REPORTS_AWAITED * config.tuning.telemetry_s + config.interval_s) / 60)


def described(use: "JobUse", figures_within_min: int = 0) -> list[str]:
    """Return the lines of `muri report JOB` about one run.

    Where its group runs on, its figures follow within so many minutes of its end.
    """
    run, shared = use.run, use.shared
    model = f" ({run.model})" if run.model else ""
    lines = [f"Job {run.shown_id}{model} of {run.user}: {run.state}; account {run.account}, QOS {run.qos}."]
    lines += [_who_shared(use), "", _row("Waited", run.start_s - run.submit_s, "from its submission to its start")]
    lines.append(_row("Ran", run.elapsed_s))
    if use.awaits_report:
        unknown = f"Not known yet: GPU time, time alone, GPU time saved. Its group (pilot job {run.pilot})"
        follow = f"still runs; the figures follow within {figures_within_min} minutes of the job's end."
        return [*lines, "", unknown, follow]
    if use.grouped and shared is not None and shared.basis == "plan":
        lines.append(_row("Alone, estimated", shared.alone_s, "the time that it ran × its planned speed", "~"))
    elif use.grouped and shared is not None and shared.is_counted:
        iteration_ms = shared.alone_s / shared.iterations * 1e3
        basis = f"{shared.iterations:,} iterations × {iteration_ms:.1f} ms of its profile"
        lines.append(_row("Alone, predicted", shared.alone_s, basis))
        ratio = f"{run.elapsed_s / shared.alone_s:.2f} times as long as predicted alone" if shared.alone_s else ""
        lines.append(_row("Longer", run.elapsed_s - shared.alone_s, ratio))
    part = use.gpu_s / (use.group_gpu_count * run.elapsed_s) if use.group_gpu_count and run.elapsed_s else 0.0
    whose = f"its share of the group's, {part:.0%} of its run" if use.grouped else "all its own"
    lines.append(_row("GPU time", use.gpu_s, whose))
    saved_s = use.saved_gpu_s
    if saved_s is not None:
        against = "GPU time, against running alone"
        lines.append(_row("Saved", saved_s, against) if saved_s >= 0 else _row("Cost", -saved_s, f"more {against}"))
    elif use.grouped:
        alone = "No report on it was written yet"
        if shared is not None:
            alone = "Its time alone is an estimate" if shared.basis else "Its time alone is not known"
        lines += ["", f"{alone}: the saving or cost of sharing is not known."]
    if shared is not None and shared.stage_s and shared.wait_s:
        lines += ["", "Milliseconds of an iteration in each stage, and waiting for its resource:"]
        lines.append(" " * 10 + "".join(f"{stage:>13}" for stage in STAGES))
        for name, times in (("held", shared.stage_s), ("waiting", shared.wait_s)):
            lines.append(f"{name:<10}" + "".join(f"{value * 1e3:>13.1f}" for value in times))
    return lines


def _row(name: str, seconds: float, what: str = "", mark: str = "") -> str:
    return f"{name:<18}{mark + _clock_text(seconds):>10}   {what}".rstrip()


def _clock_text(seconds: float) -> str:
    whole = round(abs(seconds))
    return f"{'-' if seconds <= -0.5 else ''}{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _who_shared(use: "JobUse") -> str:
    run, gpus = use.run, f"{use.group_gpu_count} GPU{'' if use.group_gpu_count == 1 else 's'}"
    if run.pilot is None:
        why = "" if run.calls_muri else ": its batch script does not call `muri run` itself"
        return f"It ran alone, on {gpus}{why}."
    if not use.grouped:
        return f"It ran alone, on {gpus} that others could have joined (pilot job {run.pilot})."
    partners = f"job{'' if len(use.partners) == 1 else 's'} {', '.join(use.partners.values())}"
    return f"It shared {gpus} with {partners} (pilot job {run.pilot})."


def as_record(use: "JobUse") -> dict[str, Any]:
    """Return one run as plain values."""
    run, shared = use.run, use.shared
    alone = shared if use.grouped and shared is not None and shared.basis else None
    return {
        "job_id": run.job_id, "task": run.task, "user": run.user, "account": run.account, "qos": run.qos,
        "state": run.state, "model": run.model, "submit_s": run.submit_s, "start_s": run.start_s, "end_s": run.end_s,
        "elapsed_s": run.elapsed_s, "gpu_count": use.group_gpu_count,
        "gpu_s": None if use.awaits_report else round(use.gpu_s, 1),
        "pilot": run.pilot, "awaits_report": use.awaits_report,
        "partners": list(use.partners),
        "alone_s": None if alone is None else alone.alone_s,
        "alone_by": None if alone is None else alone.basis,
        "iterations": shared.iterations if shared is not None and shared.iterations else None,
        "saved_gpu_s": None if use.saved_gpu_s is None else round(use.saved_gpu_s, 1),
        "stage_s": list(shared.stage_s) if shared is not None else [],
        "wait_s": list(shared.wait_s) if shared is not None else [],
    }  # fmt: skip


def _print_jobs(runs: Iterable["Run"], period: tuple[float, float], user: str | None, *, as_json: bool) -> None:
    from muri.slurm_plugin.records.usage import ended_within, uses_of

    uses = [use for use in uses_of(runs) if ended_within(use, period)]
    if as_json:
        click.echo(json.dumps([as_record(use) for use in uses], indent=1))
    else:
        names = ("JOB", "USER", "MODEL", "STATE", "RAN", "ALONE", "GPU TIME", "SAVED", "WITH")
        _print_table(names, [_job_cells(use) for use in uses], period, user)


def _print_sums(runs: Iterable["Run"], period: tuple[float, float], user: str | None, *, as_json: bool) -> None:
    from muri.slurm_plugin.records.usage import Sums, table_of

    sums = table_of(runs, period)
    if as_json:
        records = [asdict(payer) | asdict(row) for payer, row in sums.items()]
        rounded = [
            {name: round(value, 1) if isinstance(value, float) else value for name, value in record.items()}
            for record in records
        ]
        click.echo(json.dumps(rounded, indent=1))
        return
    total = Sums(*map(sum, zip(*map(astuple, sums.values()), strict=True)))
    names = ("USER", "ACCOUNT", "QOS", "JOBS", "GROUPED", "BILLED", "HAD", "ALONE", "SAVED")
    rows = [(payer.user, payer.account, payer.qos, *_sums_cells(row)) for payer, row in sums.items()]
    if len(sums) > 1:
        rows.append(("total", "", "", *_sums_cells(total)))
    _print_table(names, rows, period, user)
    if total.left_out:
        left = f"{total.left_out} of {total.grouped} grouped jobs"
        click.echo(f"ALONE and SAVED leave out {left}: no time alone was counted")


def _sums_cells(sums: "Sums") -> tuple[str, ...]:
    known = bool(sums.alone_gpu_s)
    seconds = (sums.billed_gpu_s, sums.credited_gpu_s, sums.alone_gpu_s, sums.saved_gpu_s)
    cells = [f"{value / _HOUR_S:.2f}" for value in seconds]
    return str(sums.jobs), str(sums.grouped), *cells[:2], *(cells[2:] if known else ("-", "-"))


def _job_cells(use: "JobUse") -> tuple[str, ...]:
    run, shared, saved_s = use.run, use.shared, use.saved_gpu_s
    alone = "-"
    if use.grouped and shared is not None and shared.basis:
        alone = ("" if shared.is_counted else "~") + _clock_text(shared.alone_s)
    partners = ",".join(use.partners.values()) or "-"
    return (
        run.shown_id, run.user, run.model or "-", run.state, _clock_text(run.elapsed_s), alone,
        "-" if use.awaits_report else _clock_text(use.gpu_s),
        "-" if saved_s is None else _clock_text(saved_s), partners,
    )  # fmt: skip


def _print_table(
    names: tuple[str, ...], rows: list[tuple[str, ...]], period: tuple[float, float], user: str | None
) -> None:
    from rich.cells import cell_len
    from rich.table import Table

    from muri.terminal import PlainConsole, cell, say

    begin, end = (datetime.fromtimestamp(moment_s, UTC).astimezone() for moment_s in period)
    when = f"from {begin:%Y-%m-%d} to before {end:%Y-%m-%d %H:%M}"
    if not rows:
        whose = f"of {user}" if user else "of any user" if os.geteuid() == 0 else "of yours"
        say(f"No job {whose} that had GPUs ended {when}.")
        return
    widths = [max(map(cell_len, column)) for column in zip(names, *rows, strict=True)]
    console = PlainConsole()
    if "MODEL" in names and sum(widths) + 2 * len(names) - 2 > console.width:
        at = names.index("MODEL")
        names, rows = names[:at] + names[at + 1 :], [row[:at] + row[at + 1 :] for row in rows]
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    flush_left = {"USER", "ACCOUNT", "QOS", "MODEL", "STATE", "WITH"}
    for name in names:
        drawn.add_column(name, justify="left" if name in flush_left else "right")
    for row in rows:
        drawn.add_row(*map(cell, row))
    console.print(drawn)
    unit = "" if "BILLED" not in names else "; GPU hours"
    click.echo(f"jobs that ended {when}{unit}")
