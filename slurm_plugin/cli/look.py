"""Commands that only look: queue, explain, plan, policies."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from muri.errors import UsageError
from muri.policies.registry import PolicyInfo, describe_policies, policy_problems
from muri.profiler.records import STAGES, JobUse
from muri.slurm_plugin.cli import CONFIG_OPTION, job_id_in
from muri.text import counted

if TYPE_CHECKING:
    from muri.slurm_plugin.config import Config
    from muri.slurm_plugin.controller.status import JobStatus, Status
    from muri.slurm_plugin.gateway.base import Gateway
    from muri.slurm_plugin.planning.actions import Action
    from muri.slurm_plugin.records.cluster import Snapshot
    from muri.slurm_plugin.records.roles import View

_MOST_NAMED: Final = 100
"""Jobs that are named where the requested one does not exist."""

_POLICY_WIDTHS: Final = (33, 6, 5, 6)
"""Of the columns of `muri policies` behind the name."""

_CONTEXT: Final = {"help_option_names": ["-h", "--help"]}


def _current(config: "Config", name: str = "") -> "tuple[Status, View]":
    """Return the status of all jobs, or of the named one and its group, and the view of them that it rests on."""
    from muri.slurm_plugin.controller.assemble import open_gateway
    from muri.slurm_plugin.controller.status import latest_status, refresh
    from muri.slurm_plugin.records.roles import view_of

    status, reader = latest_status(config)
    gateway = open_gateway(config.gateway)
    queue = snapshot_around(gateway, job_id_in(name)) if name else gateway.queue()
    view = view_of(queue, config.partitions)
    return refresh(status, view, reader), view


def snapshot_around(gateway: "Gateway", job_id: int) -> "Snapshot":
    """Read a job, of an array all its records, and the groups that it belongs to, each job by a small RPC."""
    from muri.slurm_plugin.records.roles import view_of

    snapshot = gateway.one_job(job_id)
    known = {job.job_id: job for job in snapshot.jobs}
    for looks_for_pilots in (True, False):
        jobs = view_of(replace(snapshot, jobs=tuple(known.values()))).jobs.values()
        if looks_for_pilots:
            others = {job.membership.pilot for job in jobs if job.membership is not None}
        else:
            others = {member for job in jobs if job.pilot_tag is not None for member in job.pilot_tag.members}
        for other in sorted(others - known.keys()):
            known |= {job.job_id: job for job in gateway.one_job(other).jobs}
    return replace(snapshot, jobs=tuple(known[number] for number in sorted(known)))


@click.command(context_settings=_CONTEXT)
@CONFIG_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def queue(config_file: Path | None, as_json: bool) -> None:
    """Show each Muri job: state, group, partners, promised, planned and measured speed.

    Speed 1.00 is as fast as alone. MIN is the promised minimum, or a waiting job's request; ! marks one that has been
    missed for a minute. PLAN is the planned speed, SPEED the measured one; ! marks a difference of more than 20 %.
    ~ marks a speed that rests on an estimate of the time alone, for a model that is not measured yet.
    CLASS, if any job has one: opp for jobs that only use leftover resources (--muri=opportunistic=1).
    CPUS, if Muri changed any: requested → given.
    States: waiting (held until Muri starts it), grouped (about to start with its partners), interleaved (running with
    them), shared (the same without turns), alone (Slurm decides, or running; with a GROUP others may join it),
    user-held.

    \b
    Examples:
      muri queue
      muri queue --json | jq '.jobs[] | select(.state == "waiting")'
    """
    from muri.slurm_plugin.controller.assemble import read_config

    status, _ = _current(read_config(config_file))
    if as_json:
        click.echo(json.dumps(asdict(status), indent=1, sort_keys=True))
        return
    show_queue(status)


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _measured(job: "JobStatus") -> str:
    return ("~" if job.is_speed_estimated and job.measured_speed is not None else "") + _speed(job.measured_speed)


def show_queue(status: "Status") -> None:
    """Print the jobs as a table, and what Slurm refused."""
    from muri.terminal import say, say_columns

    columns = ["JOB", "USER", "MODEL", "STATE", "CLASS", "GROUP", "PARTNERS", "MIN", "PLAN", "SPEED", "CPUS"]
    if not any(job.opportunistic for job in status.jobs):
        columns.remove("CLASS")
    if all(job.asked_cpu_count is None for job in status.jobs):
        columns.remove("CPUS")
    shown = {job.job_id: job.shown_id for job in status.jobs}
    rows = [_row(job, shown) for job in status.jobs]
    flush_left = {"USER", "MODEL", "STATE", "CLASS", "PARTNERS"}
    say_columns(columns, ([row[name] for name in columns] for row in rows), flush_left)
    if any("~" in row["PLAN"] + row["SPEED"] for row in rows):
        click.echo("~ by an estimate of the time alone, until the model is measured (muri profile)")
    cycle = "no controller has left its plans on this machine: these are Slurm's own records"
    if status.cycle_s:
        cycle = f"last cycle {max(0.0, time.time() - status.cycle_s):.0f} s ago, policy {status.policy}"
    click.echo(f"{counted(len(status.jobs), 'job')}; {cycle}")
    for error in status.errors:
        say(f"refused by Slurm in the last cycle: {error}", to_stderr=True)


def _row(job: "JobStatus", shown: Mapping[int, str]) -> dict[str, str]:
    asked = job.asked_cpu_count
    return {
        "JOB": job.shown_id,
        "USER": job.user,
        "MODEL": job.model or job.name,
        "STATE": job.state,
        "CLASS": "opp" if job.opportunistic else "-",
        "GROUP": "-" if job.group is None else str(job.group),
        "PARTNERS": ",".join(shown.get(partner, str(partner)) for partner in job.partners) or "-",
        "MIN": _speed(job.promised_speed) + ("!" if job.is_promise_broken else ""),
        "PLAN": ("~" if job.estimated else "") + _speed(job.predicted_speed),
        "SPEED": _measured(job) + ("!" if job.off_plan else ""),
        "CPUS": str(job.cpu_count) if asked in (None, job.cpu_count) else f"{asked} → {job.cpu_count}",
    }


@click.command(context_settings=_CONTEXT)
@click.argument("names", metavar="JOB...", nargs=-1, required=True)
@CONFIG_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(names: tuple[str, ...], config_file: Path | None, as_json: bool) -> None:
    """Say why JOB waits, its partners, and why it has them or none.

    Of a job array, JOB is one task (4711_3) or all that have not ended.

    \b
    Examples:
      muri explain 4711
      muri explain 4711_3 4712
    """
    from muri.slurm_plugin.controller.assemble import read_config
    from muri.terminal import say

    for name in names:
        job_id_in(name)  # before Slurm is asked for any
    config = read_config(config_file)
    answers = [answer for name in names for answer in _answers(config, name)]
    if as_json:
        records = [record for record, _ in answers]
        click.echo(json.dumps(records[0] if len(records) == 1 else records, indent=1, sort_keys=True))
        return
    for _, lines in answers:
        for line in lines:
            say(line)


def _answers(config: "Config", name: str) -> list[tuple[dict[str, object], list[str]]]:
    """Return a record and an explanation for each job that a name means; a UsageError where there is none."""
    status, view = _current(config, name)
    if jobs := named(status.jobs, name):
        return [(asdict(job), explanation(job)) for job in jobs]
    if own := _own_job(view, name):
        return [({"job_id": job_id_in(name), "is": own}, [f"Job {name} is {own}."])]
    known = ", ".join(job.shown_id for job in _current(config)[0].jobs[:_MOST_NAMED]) or "none"
    raise UsageError(
        f"job {name} is not a waiting or running job submitted with --muri; such jobs now: {known}. "
        f"For an ended job: muri report {name}, or scontrol show job {name}"
    )


def _own_job(view: "View", name: str) -> str:
    """Return the purpose of a pilot job or dry run; "" for other jobs."""
    job = view.active.get(job_id_in(name))
    if job is None or job.pilot_tag is None:
        return "" if job is None or job.dry_run is None else f"a dry run that measures a model of {job.user}"
    members = [each.name_in_slurm for each in map(view.active.get, job.pilot_tag.members) if each is not None]
    gpus = counted(job.gpu_count, "GPU")
    if not members:
        return f"a pilot job of {job.user}; the jobs that it held {gpus} for have ended"
    return f"the pilot job that holds {gpus} for {' and '.join(members)} of {job.user} (muri explain {members[0]})"


def named(jobs: "Sequence[JobStatus]", name: str) -> "list[JobStatus]":
    """Return the jobs that a name means: one job, all tasks of an array (12), or one task of it (12_3).

    A task that waits may have no job id of its own yet: then the array's record stands for it.
    """
    from muri.slurm_plugin.records.cluster import task_numbers

    array, _, task = name.partition("_")
    if not task:
        return [job for job in jobs if name == str(job.job_id) or job.task.startswith(f"{array}_")]
    tasks = [job for job in jobs if job.task.startswith(f"{array}_")]
    if exact := [job for job in tasks if job.task == name]:
        return exact
    ranges = {job.job_id: job.task.partition("[")[2].rstrip("]") for job in tasks if task.isdecimal()}
    return [job for job in tasks if ranges.get(job.job_id) and int(task) in task_numbers(ranges[job.job_id])]


def explanation(job: "JobStatus") -> list[str]:
    """Return what `muri explain` prints for one job."""
    from muri.slurm_plugin.planning.starts import given_text

    lines = [f"Job {job.shown_id} ({job.model or job.name}) of {job.user}: {job.state}, {job.slurm_state} in Slurm."]
    if job.opportunistic:
        lines.append("It only uses leftover resources (opportunistic), which counts under the policy antman.")
    if job.group is not None and job.partners:
        partners = ", ".join(map(str, job.partners))
        how = ", without turns" if job.state == "shared" else ""
        lines.append(f"It shares the GPUs of pilot job {job.group} with {partners}{how}.")
    elif job.group is not None:
        lines.append(f"It has the GPUs of pilot job {job.group} to itself.")
    if job.predicted_speed is not None:
        planned = f"{job.predicted_speed:.2f}{' (from an estimated profile)' if job.estimated else ''}"
        lines.append(f"Speed against running alone: planned {planned}, measured {_measured(job)}.")
    lines += promise_lines(job)
    if job.asked_cpu_count is not None:
        had = (job.asked_cpu_count, job.cpu_count, job.asked_mem_per_node_mib or 0, job.mem_per_node_mib)
        lines.append(f"Requested → given by Muri: {given_text(*had)}.")
    lines += measured_lines(job)
    lines += [f"- {reason}" for reason in job.reasons]
    return lines


def promise_lines(job: "JobStatus") -> list[str]:
    """Return the promised minimum speed, and whether the group keeps its promises, for `muri explain`."""
    lines = []
    if job.is_promise_broken:
        promised, gets = _speed(job.promised_speed), _measured(job)
        lines.append(f"It was promised {promised} and gets {gets}: its group is closed to new members.")
    elif job.promised_speed is not None:
        verb = "asks for" if job.group is None else "was promised"
        lines.append(f"It {verb} at least {_speed(job.promised_speed)} of its speed alone.")
    how = "in its group does not get the speed that it was promised: the group is closed to new members."
    return [*lines, *(f"Job {other} {how}" for other in job.promises_broken if other != job.job_id)]


def measured_lines(job: "JobStatus") -> list[str]:
    """Return the runtime's and the monitor's measurements of a job, for `muri explain`."""
    lines = []
    if job.off_plan:
        lines.append("That differs from the plan by more than 20 %: its profile may be out of date (muri profile).")
    if job.iterations is not None:
        done = counted(job.iterations, "iteration")
        lines.append(f"{done} done in this group, under {job.discipline or 'an unknown discipline'}.")
    if job.stage_s and job.wait_s:
        parts = zip(STAGES, job.stage_s, job.wait_s, strict=True)
        times = ", ".join(f"{stage} {held * 1e3:.1f} + {wait * 1e3:.1f}" for stage, held, wait in parts)
        lines.append(f"Milliseconds per iteration in each stage + waiting for its resource: {times}.")
    use = JobUse(**(job.use or {}))
    figures = (
        (use.cpu_cores, "{:.1f} cores"),
        (use.mem_gib, "{:.1f} GiB"),
        (use.disk_mib_per_s, "{:.1f} MiB/s of disks"),
        (use.gpu_utilization, "{:.0%} of a GPU"),
        (use.gpu_mem_gib, "{:.1f} GiB of GPU memory"),
    )
    if used := ", ".join(form.format(value) for value, form in figures if value is not None):
        lines.append(f"It uses {used}.")
    return lines


def _save(config_file: Path | None, file: Path) -> None:
    from muri.files import whole_file
    from muri.slurm_plugin.controller.assemble import open_gateway, read_config
    from muri.slurm_plugin.gateway.gpu_removal import read_gpu_removal
    from muri.slurm_plugin.gateway.tables import GresConf, default_path
    from muri.slurm_plugin.records.cluster import dump_snapshot

    config = read_config(config_file)
    gateway = open_gateway(config.gateway)
    taken = gateway.snapshot()
    nodes = GresConf(default_path()).with_places(gateway, taken.nodes)
    text = dump_snapshot(replace(taken, nodes=nodes, gpu_removal=read_gpu_removal(config.state_dir)))
    if str(file) == "-":
        click.echo(text, nl=False)
        return
    with whole_file(file) as draft:
        draft.write_text(text, encoding="utf-8")


@click.command(context_settings=_CONTEXT)
@CONFIG_OPTION
@click.option(
    "--save", type=click.Path(allow_dash=True, path_type=Path), help="Write queue and nodes as JSON; -: print."
)
@click.option("--snapshot", "file", type=click.Path(path_type=Path), help="Plan for a file that --save has written.")
@click.option("--profiles", type=click.Path(path_type=Path), help="Profile store. [default: profiles.db in state_dir]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one action a line.")
def plan(config_file: Path | None, save: Path | None, file: Path | None, profiles: Path | None, as_json: bool) -> None:
    """Save the queue and the nodes, or print the plan for saved ones; changes nothing.

    A plan needs no Slurm. The saved time is the clock: the same files give the same plan, byte for byte.

    \b
    Examples:
      muri plan --save s.json
      muri plan --snapshot s.json
    """
    if (save is None) == (file is None):
        raise UsageError("give --save FILE to write the queue and the nodes, or --snapshot FILE to plan for them")
    if save is not None:
        _save(config_file, save)
    elif file is not None:
        _print_plan(config_file, file, profiles, as_json)


def _print_plan(config_file: Path | None, file: Path, profiles: Path | None, as_json: bool) -> None:
    from muri.profiler.store import ProfileStore
    from muri.profiler.store_file import exists
    from muri.slurm_plugin.controller.assemble import policy_of, profiles_path, read_config
    from muri.slurm_plugin.controller.cycle import cycle_input
    from muri.slurm_plugin.planning.actions import render_action
    from muri.slurm_plugin.planning.decision import decide
    from muri.slurm_plugin.records.cluster import load_snapshot
    from muri.terminal import say

    config = read_config(config_file)
    path = profiles or profiles_path(config)
    if profiles is not None and not exists(path):
        raise UsageError(f"there is no profile store {profiles}")
    with ProfileStore(path, read_only=True) if exists(path) else nullcontext() as store:
        cycle = cycle_input(load_snapshot(file), store, config)
    decision = decide(cycle, policy_of(config, cycle.view.snapshot.limits.priority_type))
    if as_json:
        for action in decision.repairs + decision.actions:
            click.echo(json.dumps(render_action(action), sort_keys=True, default=str))
        return
    for group in decision.plan.groups:
        members = ", ".join(map(str, group.members))
        turns = f"γ = {group.efficiency:.3f}, T = {group.period_s:.4f} s"
        joining = f"; joining: {', '.join(map(str, group.joining))}" if group.joining else ""
        how = "without turns" if group.mode == "plain" else turns
        click.echo(f"group on {group.node}: jobs {members}; {how}{joining}")
    alone = _reasons_alone(decision.actions)
    for solo in decision.plan.solo:
        if solo.job_id in alone:
            say(f"alone: job {solo.job_id}: {'; '.join(alone[solo.job_id])}")
    for run in decision.preparation.dry_runs:
        say(f"dry run: {run.key}, script of job {run.job_id}")
    for job_id, why in sorted(decision.preparation.waiting.items()):
        say(f"waiting: job {job_id}: {why}")
    for waiting in decision.plan.waiting:
        say(f"waiting: job {waiting.job_id}: {'; '.join(map(str, waiting.reasons))}")


def _reasons_alone(actions: "Iterable[Action]") -> dict[int, tuple[str, ...]]:
    """Reasons of jobs that start alone, with a pilot job of their own or without, by job id."""
    from muri.slurm_plugin.planning.actions import ReleaseSolo, StartGroup

    reasons: dict[int, tuple[str, ...]] = {}
    for action in actions:
        match action:
            case ReleaseSolo(job_id=job_id):
                reasons[job_id] = action.reasons
            case StartGroup(members=(member,)):
                reasons[member.job_id] = action.reasons
    return reasons


@click.command(context_settings=_CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def policies(as_json: bool) -> None:
    """List the policies: their order, whether jobs share GPUs, whether running ones may be stopped.

    Choose one with `policy:` in the configuration. The first is the default. Running jobs are stopped only if they
    can resume from a checkpoint, and only with preemption.enabled. LIVE says whether Slurm can carry out the
    policy's plans: the configuration refuses one that is only for `muri simulate`. Other distributions, such as
    muri-lab, add policies by the entry point group "muri.policies". Exits with 1 if one of those cannot be used.

    \b
    Examples:
      muri policies
      muri policies --json | jq -r '.policies[] | select(.shares) | .name'
      muri policies --json | jq -r '.policies[] | select(.live != "yes") | [.name, .live_limit] | @tsv'
    """
    infos, problems = describe_policies(), policy_problems()
    if as_json:
        click.echo(json.dumps({"policies": [asdict(info) for info in infos], "problems": problems}, indent=1))
    else:
        _print_policies(infos)
    broken = (*(info.problem for info in infos if info.problem), *problems)
    for problem in broken:
        click.echo(f"muri: {problem}", err=True)
    if broken:
        raise click.exceptions.Exit(1)


def _print_policies(infos: Sequence[PolicyInfo]) -> None:
    """Print a line of facts for each policy, its summary below that, and the limits of Slurm, once for all policies."""
    from rich.padding import Padding
    from rich.table import Table

    from muri.terminal import PlainConsole

    console = PlainConsole()
    widths = (max((len(info.name) for info in infos), default=6), *_POLICY_WIDTHS)

    def line(*words: str, style: str = "") -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        for width in widths:
            table.add_column(width=width)
        table.add_row(*words, style=style)
        return table

    console.print(line("POLICY", "GOES FIRST", "SHARES", "STOPS", "LIVE", style="bold"))
    limited: dict[tuple[str, str], list[str]] = {}
    for info in infos:
        words = (_word(info.shares), _word(info.preempts), info.live or "?")
        summary = "cannot be used, see below" if info.problem else info.summary
        origin = "" if info.source == "built-in" else f" ({info.source})"
        console.print(line(info.name, info.order or "?", *words), Padding(summary + origin, (0, 0, 0, 4)))
        if info.live_limit:
            limited.setdefault((info.live, info.live_limit), []).append(info.name)
    click.echo()
    for (live, limit), names in limited.items():
        console.print(f"LIVE {live} ({', '.join(names)}): {limit}")


def _word(value: bool | None) -> str:
    return "?" if value is None else "yes" if value else "no"
