"""`muri setup`: bring Slurm's configuration to what Muri needs, or back."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click

from muri.errors import MuriError, UsageError
from muri.slurm_plugin.cli.admin import CONFIG_OPTION
from muri.slurm_plugin.config import Config, config_path, load_config
from muri.slurm_plugin.setup.site import Change, Site, added, backup_of, find_site, missing, replace_files, try_out

_RESTART = (
    "Slurm has not been told yet. Once every host with files of its own has the same slurm.conf and gres.conf: from "
    "Slurm 23.11 on `scontrol reconfigure`; before, which reads no GRES then, `systemctl restart slurmctld`, and "
    "`systemctl restart slurmd` on every node. Running jobs stay"
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--check", "mode", flag_value="check", help="Show what is missing, as a diff; exit with 1 if anything is."
)
@click.option("--apply", "mode", flag_value="apply", help="Do it. A copy of each file stays beside it.")
@click.option("--remove", "mode", flag_value="remove", help="Give every job back to Slurm and restore the files.")
@click.option("--purge", is_flag=True, help="With --remove: delete the state directory and all run directories, too.")
@click.option("--slurm-conf", type=click.Path(path_type=Path), help="[default: $SLURM_CONF or /etc/slurm/slurm.conf]")
@CONFIG_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def setup(mode: str | None, purge: bool, slurm_conf: Path | None, config_file: Path | None, as_json: bool) -> None:
    """Bring Slurm's configuration on this host to what Muri needs, or back.

    slurm.conf: the licence muri_gate, the GRES muri on nodes with GPUs, job_submit/lua. gres.conf: the GRES muri.
    plugstack.conf: the SPANK plugin, where it is installed. job_submit.lua, where the controller is installed: Muri's
    part behind your own functions. Nothing of yours is overwritten: Muri adds marked blocks, and words to lines that
    must stand once. --remove takes exactly these out. Slurm's own programs read the result before it replaces a file.

    --remove on the controller's machine first stops the controller and does what `muri drain --wait` does.

    \b
    Examples:
      muri setup --check                 what would change?
      muri setup --apply
      muri setup --remove                before the packages are removed: docs/removal.md
    """
    if mode is None:
        raise UsageError("say what to do: --check, --apply or --remove")
    if purge and mode != "remove":
        raise UsageError("--purge goes with --remove only")
    if mode != "check" and os.geteuid() != 0:
        raise UsageError(f"muri setup --{mode} must run as root: it changes Slurm's files; --check only looks")
    site = find_site(slurm_conf)
    if mode == "remove":
        _remove(site, _config(config_file), purge=purge, as_json=as_json)
        return
    changes = missing(site, with_licence=_config(config_file).gate == "licence")
    if mode == "check":
        _check(site, changes, as_json=as_json)
    else:
        _apply(site, changes, as_json=as_json)


def _config(config_file: Path | None) -> Config:
    """Read muri.yaml; most hosts have none."""
    return load_config(config_path(config_file))


def _check(site: Site, changes: Sequence[Change], *, as_json: bool) -> None:
    if as_json:
        _print_json(site, changes, is_done=False)
    elif changes:
        click.echo("".join(change.diff for change in changes), nl=False)
    if not as_json:
        _say_what_is_not_here(site)
        click.echo(
            f"{len(changes)} file(s) lack something; `muri setup --apply` adds it" if changes else "all is there"
        )
    click.get_current_context().exit(1 if changes else 0)


def _apply(site: Site, changes: Sequence[Change], *, as_json: bool) -> None:
    if changes:
        try_out(site, changes)
        replace_files(changes, keep_backups=True)
    if site.has_controller and site.job_submit.exists():
        site.job_submit.touch()  # so that slurmctld reads Muri's own Lua files anew after an upgrade
    if as_json:
        _print_json(site, changes, is_done=True)
        return
    for change in changes:
        copy = f" (as it was: {backup_of(change.path)})" if change.before is not None else " (new)"
        click.echo(f"changed {change.path}{copy}")
    _say_what_is_not_here(site)
    click.echo(f"{_RESTART}." if changes else "all was there; nothing changed")


def _say_what_is_not_here(site: Site) -> None:
    if not site.has_plugin:
        click.echo("muri-spank is not installed on this host, so plugstack.conf was not looked at")
    if not site.has_controller:
        click.echo("muri-controller is not installed on this host, so job_submit.lua was not looked at")


def _print_json(site: Site, changes: Sequence[Change], *, is_done: bool) -> None:
    files = [{"path": str(change.path), "is_new": change.before is None, "diff": change.diff} for change in changes]
    document = {
        "complete": is_done or not changes, "changed": is_done and bool(changes), "files": files,
        "plugin_installed": site.has_plugin, "controller_installed": site.has_controller,
    }  # fmt: skip
    click.echo(json.dumps(document, indent=1))


def _remove(site: Site, config: Config, *, purge: bool, as_json: bool) -> None:
    cleared = _give_jobs_back(config, as_json) if site.has_controller else ()
    changes = added(site)
    if changes:
        try_out(site, changes)
        replace_files(changes, keep_backups=False)
    deleted = _purge(config) if purge else ()
    if as_json:
        paths = [str(change.path) for change in changes]
        document = {"restored": paths, "jobs_cleared": list(cleared), "deleted": [*map(str, deleted)]}
        click.echo(json.dumps(document, indent=1))
        return
    for change in changes:
        click.echo(f"restored {change.path}")
    if cleared:
        click.echo(f"took Muri's words from the AdminComment of jobs {', '.join(map(str, cleared))}")
    for path in deleted:
        click.echo(f"deleted {path}")
    click.echo(f"{_RESTART}." if changes else "nothing of Muri's was in Slurm's files")


def _give_jobs_back(config: Config, as_json: bool) -> tuple[int, ...]:
    """Stop the controller, let every job go on without Muri, and take its words from their AdminComments.

    Raises:
        MuriError: Slurm does not answer, or refuses.
    """
    from muri.slurm_plugin.controller.loop import end_watcher
    from muri.slurm_plugin.execute.drain import drain_until_over
    from muri.slurm_plugin.execute.farewell import clear_tags
    from muri.slurm_plugin.gateway.commands import CommandGateway

    if shutil.which("systemctl") and Path("/run/systemd/system").is_dir():
        units = ["muri-controller-events.service", "muri-controller.timer", "muri-watchdog.timer"]
        subprocess.run(["systemctl", "disable", "--now", *units], capture_output=True, check=False)
    if not end_watcher(config.state_dir):
        raise MuriError("the controller does not end; nothing was removed")
    config.events.notice_file.unlink(missing_ok=True)
    gateway = CommandGateway()
    for done in drain_until_over(gateway, gateway.tagged):
        if done.running and not as_json:
            click.echo(f"waiting for the members {', '.join(map(str, done.running))} to end", err=True)
    if done.failed:
        raise MuriError("some jobs could not be given back, so nothing was removed:\n  " + "\n  ".join(done.failed))
    return clear_tags(gateway, gateway.tagged)


def _purge(config: Config) -> tuple[Path, ...]:
    from muri.run_dir import SITE_RUN_DIR

    places = (config.state_dir, config.status_dir, SITE_RUN_DIR, Path("/var/log/muri"))
    there = tuple(place for place in places if place.exists())
    for place in there:
        shutil.rmtree(place, ignore_errors=True)  # a mount point itself stays
    return there
