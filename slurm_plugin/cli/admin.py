"""Commands for administrators: muri-controller, drain, config, preempt."""

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muri.commands import Group
from muri.errors import MuriError, UsageError
from muri.inherited import PUBLIC, settle_own
from muri.slurm_plugin.cli import CONFIG_OPTION, job_id_in
from muri.slurm_plugin.config import Config, config_path, notes_on, problems_of, render_config
from muri.slurm_plugin.private_files import user_name
from muri.text import FewWarnings, log_handler, printable, printable_lines

if TYPE_CHECKING:
    from muri.slurm_plugin.execute.gate import Drained


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG_OPTION
@click.option("--once", is_flag=True, help="Run one cycle and exit (for cron and systemd timers).")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(min=0.1), help="Run a cycle every SECONDS until stopped."
)
@click.option(
    "--events", is_flag=True, help="Run a cycle soon after each arrival or end until stopped, beside a timer's --once."
)
@click.option("--dry-run", is_flag=True, help="Print what one cycle would do, as JSON lines, and change nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Log more.")
def controller(
    config_file: Path | None, once: bool, interval_s: float | None, events: bool, dry_run: bool, verbose: bool
) -> None:
    """Read the queue, group waiting jobs, and start them.

    A cycle that fails is tried again at the next one; jobs stay as they are meanwhile. A second controller
    on the same state_dir says so and exits with 0, or with 1 if the first has finished no cycle for long.

    \b
    Examples:
      muri-controller --dry-run             what would happen now?
      muri-controller --once                one cycle
      muri-controller --interval 360        a cycle every six minutes, and soon after each arrival or end
      muri-controller --events              only the latter, where a timer calls --once
    """
    from muri.slurm_plugin.controller.assemble import open_controller, read_trusted_config
    from muri.slurm_plugin.controller.loop import StopSignal, serve_forever, serve_on_events, serve_once
    from muri.slurm_plugin.planning.actions import render_action

    if sum((once, interval_s is not None, events, dry_run)) != 1:
        raise UsageError("say one of --once, --interval SECONDS, --events or --dry-run")
    handler = log_handler()
    handler.addFilter(FewWarnings())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)
    config = read_trusted_config(config_file)
    if dry_run:
        with open_controller(config, look_only=True) as instance:
            decision = instance.decision()
        for action in decision.repairs + decision.actions:
            click.echo(json.dumps(render_action(action), sort_keys=True, default=str))
        return
    if os.geteuid() != 0:
        raise UsageError(
            f"muri-controller must run as root, not as {user_name(os.geteuid())}: it submits pilot jobs and dry runs "
            "as their users, which Slurm allows to root only, not to SlurmUser. Nothing was changed"
        )
    settle_own(PUBLIC)
    stop = StopSignal()
    stop.heed_signals()
    if events and not config.events.enabled:
        click.echo("events.enabled is off in muri.yaml; nothing to do", err=True)
    elif events:
        serve_on_events(config_file, config, stop)
    elif interval_s is None:
        serve_once(config, stop)
    else:
        serve_forever(config, interval_s, stop)


def controller_main() -> None:
    """Entry point of the console script `muri-controller`."""
    from muri.commands import run_command

    sys.exit(run_command(controller))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@CONFIG_OPTION
@click.option("--if-stale", "stale_s", type=float, help="Only when no cycle has finished for SECONDS (watchdog).")
@click.option("--wait", is_flag=True, help="Stay until the last group has ended, for jobs that come back held.")
@click.option("--forget", is_flag=True, help="As --wait; then take Muri's tags from all jobs, before it is removed.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON; with --wait a line for each pass.")
def drain(config_file: Path | None, stale_s: float | None, wait: bool, forget: bool, as_json: bool) -> None:
    """Let Slurm start every waiting job, with its original request.

    The reservation muri_gate is deleted first: Slurm then starts what waits for its license by itself, and new jobs
    with --muri start as ordinary jobs. Reads job ids, owners, states and Muri's tags only, through Slurm's commands, so
    it works when the controller does not. Jobs in a running group keep running. One that loses its group needs its own
    GPUs back: use --wait, or leave the watchdog on. Stop the controller first, or it makes the reservation again.

    \b
    Examples:
      muri drain                         give every job back to Slurm
      muri drain --wait                  the same, and look after running groups until they have ended
      muri drain --if-stale 1800         the same, only if the controller has been dead for half an hour
      muri drain --forget                before Muri is removed
    """
    from muri.slurm_plugin.controller.loop import end_watcher
    from muri.slurm_plugin.controller.status import STATUS_NAME, age_s
    from muri.slurm_plugin.execute.gate import clear_tags, drain_until_over
    from muri.slurm_plugin.execute.gate import drain as drain_jobs
    from muri.slurm_plugin.gateway.commands import CommandGateway

    config = _config_to_drain_with(config_file)
    age = age_s(config.state_dir / STATUS_NAME, time.time())
    if stale_s is not None and age is not None and age < stale_s:
        click.echo(f"the last cycle finished {age:.0f} s ago; nothing to do")
        return
    wait = wait or forget
    if forget:
        if not end_watcher(config.state_dir):
            raise MuriError("the controller does not end; no job was changed")
        config.events.notice_file.unlink(missing_ok=True)
    with _only_one_unless_hung(config.state_dir, stale_s):
        gateway = CommandGateway()
        for done in drain_until_over(gateway, gateway.tagged) if wait else (drain_jobs(gateway, gateway.tagged),):
            _print_drained(done, as_json=as_json, one_line=wait)
        if forget and not done.failed:
            cleared = clear_tags(gateway, gateway.tagged)
            if as_json:
                click.echo(json.dumps({"cleared": list(cleared)}))
            elif cleared:
                click.echo(f"took Muri's tags from the AdminComment of jobs {', '.join(map(str, cleared))}")
    if done.running and not as_json:
        click.echo("members run on: leave the watchdog on, or run `muri drain --wait`, for those that come back held",
                   err=True)  # fmt: skip
    if done.failed:
        sys.exit(1)


def _config_to_drain_with(config_file: Path | None) -> Config:
    """Read the configuration; if it is broken, jobs are given back all the same."""
    from muri.slurm_plugin.config import ConfigError, state_dir_of_refused
    from muri.slurm_plugin.controller.assemble import read_trusted_config

    try:
        return read_trusted_config(config_file)
    except ConfigError as error:
        built_in = Config()
        state_dir = state_dir_of_refused(config_path(config_file)) or built_in.state_dir
        click.echo(
            f"muri: {printable_lines(str(error))}\nmuri: going on with the built-in settings and state_dir {state_dir}",
            err=True,
        )
        return built_in.model_copy(update={"state_dir": state_dir})


@contextmanager
def _only_one_unless_hung(state_dir: Path, stale_s: float | None) -> Iterator[None]:
    """Hold the controller's lock; proceed without it if its holder has finished no cycle for `stale_s` seconds.

    If such a controller wakes up after all, the next cycle or drain mends the actions that it had begun.
    """
    from muri.slurm_plugin.controller.loop import LOCK_NAME, AnotherControllerError, only_one
    from muri.slurm_plugin.controller.status import age_s

    with ExitStack() as stack:
        try:
            stack.enter_context(only_one(state_dir))
        except AnotherControllerError:
            held_s = age_s(state_dir / LOCK_NAME, time.time())
            if stale_s is None or held_s is None or held_s < stale_s:
                raise
            click.echo(f"a controller hangs: its lock is {held_s:.0f} s old; jobs are released all the same", err=True)
        yield


def _print_drained(done: "Drained", *, as_json: bool, one_line: bool) -> None:
    from muri.terminal import say

    fields = {name: values for name, values in asdict(done).items() if values or not one_line}
    if as_json:
        click.echo(json.dumps(asdict(done), indent=None if one_line else 1))
    elif one_line:
        say("; ".join(f"{name} {', '.join(map(str, values))}" for name, values in fields.items()) or "all done")
    else:
        for name, values in fields.items():
            say(f"{name:<10}{', '.join(map(str, values)) or '-'}")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def config() -> None:
    """Check the configuration file, and show the values in force."""


@config.command("check")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--show", is_flag=True, help="Also print the values in force, each key under its meaning.")
def config_check(file: Path | None, show: bool) -> None:
    """Check a configuration file; exits with 2 when something is wrong.

    Where Slurm answers, it also looks there for the partitions, the QOS and the types of GPUs that the file names.

    \b
    Examples:
      muri config check
      muri config check --show /etc/muri/muri.yaml
    """
    from muri.slurm_plugin.cli.doctor_slurm import look_for_names
    from muri.slurm_plugin.controller.assemble import check_policy, read_config

    config = read_config(file)
    policy = check_policy(config)
    named = look_for_names(config)
    if named.wrong:
        raise problems_of(config_path(file), named.wrong)
    if show:
        click.echo(render_config(config), nl=False)
    click.echo(f"{config_path(file) or 'built-in defaults'}: fine", err=show)
    for note in notes_on(config_path(file)):
        click.echo(note, err=show)
    for unchecked in filter(None, (policy, *named.unchecked)):
        click.echo(f"not checked here: {unchecked}", err=show)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="JOB")
@CONFIG_OPTION
@click.option("--yes", is_flag=True, help="Do not ask.")
def preempt(name: str, config_file: Path | None, yes: bool) -> None:
    """Stop running JOB at its next iteration; it waits in the queue and resumes later.

    For administrators and the job's owner. Only a job that was submitted with --muri=checkpoint=1 and whose
    script has called muri.checkpoint can be stopped. The controller decides when it runs again; where its owner has
    stopped it and it is in no group, Slurm does.

    \b
    Examples:
      muri preempt 4711                  asks first
      muri preempt 4711 --yes            for scripts
    """
    from muri.slurm_plugin.controller.assemble import open_gateway, read_config
    from muri.slurm_plugin.controller.status import CYCLES_MISSED, cycle_age_s
    from muri.slurm_plugin.execute.gate import stop_as_caller
    from muri.slurm_plugin.node.membership import mark_stopped
    from muri.slurm_plugin.planning.running import why_not_preemptible
    from muri.slurm_plugin.records.roles import view_of

    config = read_config(config_file)
    gateway = open_gateway(config.gateway)
    view = view_of(gateway.one_job(job_id_in(name)), config.partitions)
    job = next((job for job in view.jobs.values() if name in {str(job.job_id), job.name_in_slurm}), None)
    if job is None:
        raise UsageError(f"Slurm knows no job {name}; `squeue --me` lists yours")
    job_id = job.job_id
    reason = why_not_preemptible(job)
    if reason:
        shown = job.name_in_slurm
        raise UsageError(f"job {shown} cannot be stopped and resumed: {reason}. To end it: scancel {shown}")
    age_s = cycle_age_s(config, time.time())
    if age_s is not None and age_s > CYCLES_MISSED * config.interval_s:
        click.echo(
            f"warning: the controller finished its last cycle {age_s:.0f} s ago; a stopped job waits, held, for its "
            "next one, or for `muri drain`",
            err=True,
        )
    if not yes:
        whose = printable(f"{job_id} ({job.name}) of {job.user}")
        click.confirm(f"Stop job {whose} and put it back into the queue?", abort=True)
    mark_stopped(job_id, job.restart_count)
    stop_as_caller(gateway, job)
    click.echo(f"job {job_id} is being saved and goes back to the queue")
