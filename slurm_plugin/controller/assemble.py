"""Put the controller's parts together from a configuration: policy, gateway, stores."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from muri.clock import MACHINE_CLOCK, Clock
from muri.policies.registry import describe_policies, get_policy
from muri.policies.types import Policy
from muri.profiler.store import ProfileStore
from muri.pythons import OF_THE_CONTROLLER, what_plans
from muri.slurm_plugin.config import Config, ConfigError, config_path, load_config, require_trusted
from muri.slurm_plugin.controller.status import STATUS_NAME, StatusError, read_status
from muri.slurm_plugin.execute.apply import StopFlag
from muri.slurm_plugin.gateway.accounting import Accounting
from muri.slurm_plugin.gateway.base import Gateway, GatewayUnavailableError
from muri.slurm_plugin.gateway.commands import CommandGateway
from muri.slurm_plugin.gateway.pyslurm_api import NoPyslurmError, PyslurmGateway
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.gateway.tables import GresConf, default_path
from muri.slurm_plugin.private_files import make_private_directory, open_private_file
from muri.slurm_plugin.records.journal import CorruptJournalError, Journal, random_token, set_aside_journal

if TYPE_CHECKING:
    from muri.slurm_plugin.controller.cycle import Controller

log = logging.getLogger(__name__)

GatewayKind = Literal["auto", "pyslurm", "command"]

_MULTIFACTOR: Final = "priority/multifactor"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The machine's own by default; the twin has others, so that the same seed gives the same course."""

    stop: StopFlag = field(default_factory=threading.Event)  # Ends a cycle between two calls
    clock: Clock = MACHINE_CLOCK  # The clock to read and to wait by
    accounting: Accounting | None = None  # Slurm's accounts, None for those of this machine's commands
    new_token: Callable[[], str] = random_token  # Names an intent
    # Which GPUs of a node are near each other
    gres_conf: GresConf = field(default_factory=lambda: GresConf(default_path()))


def read_config(path: Path | None) -> Config:
    """Load a command's configuration, or the site's; a ConfigError if it is unreadable or wrong.

    $MURI_STATE_DIR wins over its state_dir, and $MURI_STATUS_DIR over its status_dir.
    """
    config = load_config(config_path(path))
    chosen = {name: os.environ.get(f"MURI_{name.upper()}") for name in ("state_dir", "status_dir")}
    return config.model_copy(update={name: Path(value) for name, value in chosen.items() if value})


def read_trusted_config(path: Path | None) -> Config:
    """As `read_config`, for acting on others' jobs: a ConfigError, too, if others could have written it."""
    require_trusted(config_path(path))
    return read_config(path)


def policy_of(config: Config, priority_type: str = "", *, stopping: bool = False) -> Policy:
    """Make the configured policy.

    Args:
        config: The configuration.
        priority_type: The site's PriorityType, "" if unknown. `auto` follows Slurm's priorities where they count.
        stopping: Plan as if preemption were enabled.

    Raises:
        UnknownPolicyError: No policy has that name.
        SitePolicyError: The distribution that offers it is broken.
        OptionsError: An option contradicts the policy.
        ConfigError: The policy exists in the simulator only.
    """
    grouping = config.grouping
    options: dict[str, Any] = {
        "max_group_size": grouping.max_group_size,
        "max_wait_s": grouping.max_wait_s,
        "preemption": stopping or config.preemption.enabled,
        "join": grouping.join,
        "min_speed": grouping.min_speed,
    }
    if both := sorted(options.keys() & config.policy_options):
        keys = ", ".join("preemption.enabled" if name == "preemption" else f"grouping.{name}" for name in both)
        raise ConfigError(f"policy_options: {', '.join(both)} cannot stand there; set {keys}")
    options |= {name: tuple(value) if isinstance(value, list) else value
                for name, value in config.policy_options.items()}  # fmt: skip
    name = "muri-slurm" if config.policy == "auto" and priority_type == _MULTIFACTOR else config.policy
    policy = get_policy(name, options)
    if policy.elastic:
        valid = ", ".join(info.name for info in describe_policies() if info.live != "no")
        raise ConfigError(
            f"policy {config.policy} is for comparisons in `muri simulate` only, Slurm can't be run by it; choose one "
            f"of these for the cluster: {valid}"
        )
    return policy


def check_policy(config: Config) -> str:
    """Make the configured policy, with the errors of `policy_of`; returns why only its name could be checked, or ""."""
    try:
        policy_of(config)
    except ModuleNotFoundError as error:
        if error.name not in OF_THE_CONTROLLER:
            raise
        return f"of policy {config.policy} only the name was checked: it {what_plans(error.name)}"
    return ""


def profiles_path(config: Config) -> Path:
    """Return where the profile store lives: $MURI_PROFILES, or profiles.db in the state directory."""
    explicit = os.environ.get("MURI_PROFILES")
    return Path(explicit) if explicit else config.state_dir / "profiles.db"


@contextmanager
def open_controller(
    config: Config,
    gateway: Gateway | None = None,
    *,
    look_only: bool = False,
    looping: bool = False,
    surroundings: Surroundings | None = None,
) -> "Iterator[Controller]":
    """Open journal, profiles and gateway and give a controller; all are closed at the end.

    Args:
        config: The configuration.
        gateway: Use this one instead of opening the configured kind.
        look_only: Leave a damaged profile store where it is; the caller changes nothing.
        looping: The process runs many cycles, so it logs its gateway at its start; others, and the reasons, only if
            it has changed since the last cycle.
        surroundings: Clock, accounts and stop signal; the machine's own by default.

    Raises:
        UnsafeFileError: The state directory or a file in it cannot be made, or is not the controller's alone.
        CorruptStoreError: With `look_only`, the profile store is damaged.
    """
    # Planning needs NumPy, which hosts that only look need not have.
    from muri.slurm_plugin.controller.cycle import Controller
    from muri.slurm_plugin.profile_use import open_profiles

    policy_of(config)  # a wrong one is reported before any file is made
    make_private_directory(config.state_dir)
    path, journal_path = profiles_path(config), config.state_dir / "journal.db"
    for database in {path, journal_path}:
        if database.parent == config.state_dir:
            os.close(open_private_file(database))  # SQLite gives its side files the same mode
    around = surroundings or Surroundings()
    profiles = ProfileStore(path) if look_only else open_profiles(path)
    with profiles as store, _open_journal(journal_path, around, look_only=look_only) as journal:
        way = gateway or _open_and_say(config, always=looping)
        policies = cache(partial(policy_of, config))
        yield Controller(way, journal, store, policies, config, around, look_only=look_only)


def _open_journal(path: Path, around: Surroundings, *, look_only: bool) -> Journal:
    """Open the journal; a damaged one is set aside unless nothing may be changed."""
    try:
        return Journal(path, around.new_token)
    except CorruptJournalError as error:
        if look_only:
            raise
        set_aside_journal(path, error, datetime.now(UTC))
        return Journal(path, around.new_token)


def _open_and_say(config: Config, *, always: bool) -> Gateway:
    """Open the gateway; log why another cannot be used if the last cycle used another, else its name (if `always`)."""
    lacking: list[GatewayUnavailableError] = []
    gateway = open_gateway(config.gateway, lacking.append)
    try:
        last_name = read_status(config.state_dir / STATUS_NAME).gateway
    except StatusError:
        last_name = ""
    if gateway.name == last_name:
        log.log(logging.INFO if always else logging.DEBUG, "speaking to Slurm by the gateway %s", gateway.name)
        return gateway
    for why in lacking:
        level = logging.INFO if isinstance(why, NoPyslurmError) else logging.WARNING
        log.log(level, "speaking to Slurm by the gateway %s: %s", gateway.name, why)
    return gateway


def open_gateway(
    kind: GatewayKind = "auto", note: Callable[[GatewayUnavailableError], None] = lambda _: None
) -> Gateway:
    """Open the configured gateway; "auto" means pyslurm where it works, else the commands.

    Args:
        kind: The configured kind.
        note: Takes the reason why "auto" does not use pyslurm, which is normal on many machines.

    Raises:
        GatewayUnavailableError: It cannot work on this machine; the text says what to do.
        SlurmUnreachableError: slurmctld does not answer.
    """
    commands = SlurmCommands()
    if kind == "command":
        return CommandGateway(commands)
    try:
        return PyslurmGateway(commands)
    except GatewayUnavailableError as err:
        if kind == "pyslurm":
            raise
        note(err)
        return CommandGateway(commands)
