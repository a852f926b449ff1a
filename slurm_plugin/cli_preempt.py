"""The command `muri preempt`: stop a running job, to go on later from its checkpoint."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from muri.errors import UsageError
from muri.slurm_plugin.cli import CONFIG_OPTION

if TYPE_CHECKING:
    from muri.slurm_plugin.config import Config


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_id", metavar="JOB", type=int)
@CONFIG_OPTION
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON; needs --yes.")
def preempt(job_id: int, config_file: Path | None, yes: bool, as_json: bool) -> None:
    """Stop running JOB at its next iteration; it waits in the queue and goes on later.

    For administrators and the job's owner. Only a job that was submitted with --muri=checkpoint=1 and whose
    script has called muri.checkpoint can be stopped. The controller decides when it runs again.

    \b
    Examples:
      muri preempt 4711                  asks first
      muri preempt 4711 --yes --json     for scripts
    """
    from muri.slurm_plugin.member import mark_stopped
    from muri.slurm_plugin.open_gateway import open_gateway
    from muri.slurm_plugin.preemption import why_not_preemptible
    from muri.slurm_plugin.setup import read_config
    from muri.slurm_plugin.view import view_of

    if as_json and not yes:
        raise UsageError("--json asks no questions: give --yes, too")
    config = read_config(config_file)
    gateway = open_gateway(config.gateway)
    view = view_of(gateway.snapshot(), config.partitions)
    job = view.jobs.get(job_id)
    if job is None:
        raise UsageError(f"Slurm knows no job {job_id}; `squeue --me` lists yours")
    reason = why_not_preemptible(job, view.roles[job_id])
    if reason:
        raise UsageError(f"job {job_id} cannot be stopped and resumed: {reason}. To end it: scancel {job_id}")
    _warn_if_nobody_would_resume(config)
    if not yes:
        click.confirm(f"Stop job {job_id} ({job.name}) of {job.user} and put it back into the queue?", abort=True)
    mark_stopped(job_id, job.restart_count)
    gateway.requeue_hold(job_id)
    if as_json:
        click.echo(json.dumps({"job_id": job_id, "stopped": True, "run": job.restart_count}))
    else:
        click.echo(f"job {job_id} is being saved; the controller puts it back into the queue at its next cycle")


def _warn_if_nobody_would_resume(config: "Config") -> None:
    from muri.slurm_plugin.doctor_checks import CYCLES_MISSED
    from muri.slurm_plugin.status import age_s

    age = age_s(config.state_dir / "status.json", time.time())
    if age is not None and age > CYCLES_MISSED * config.interval_s:
        click.echo(
            f"warning: the controller finished its last cycle {age:.0f} s ago; a stopped job waits, held, for its next "
            "one, or for `muri drain`",
            err=True,
        )
