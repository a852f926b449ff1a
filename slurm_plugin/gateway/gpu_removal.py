"""Find out, on the real slurmctld, whether and how a waiting job's GPUs can be taken away.

A release of Slurm that cannot do it accepts the change and shows it, but hands out the GPU. So a held job of Muri's own
is changed. Where Slurm tracks GPUs as TRES, the TRES that it counts for the job tell the truth. Elsewhere the job has
to run for a moment, on any free node. The outcome is kept in a file, and holds until slurmctld starts again.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from muri.clock import MACHINE_CLOCK, Clock
from muri.files import atomic_json
from muri.slurm_plugin.gateway.accounting import slurm_settings
from muri.slurm_plugin.gateway.base import Gateway, GatewayError, SlurmUnreachableError, first_line, no_such_gres
from muri.slurm_plugin.gateway.slurm_commands import SlurmCommands
from muri.slurm_plugin.records.cluster import Job, JobState, Node, Snapshot
from muri.slurm_plugin.records.comment_tags import REQUEST_PREFIX, token
from muri.slurm_plugin.records.limits import (
    EVERY_FORM,
    NOT_TRIED,
    PER_NODE,
    TYPED,
    WAYS,
    GpuRemoval,
    Place,
    TriedForm,
)

log = logging.getLogger(__name__)

PROBE_NAME: Final = "muri-probe"

_START_TIMEOUT_S: Final = 15.0
_POLL_S: Final = 0.2
_MEM_MIB: Final = 64
_OLD_NOTATION: Final = "gres:"
_SITE: Final = ("SLURM_VERSION", "BOOT_TIME", "GresTypes", "AccountingStorageTRES")


def place_for(nodes: tuple[Node, ...], partitions: tuple[str, ...]) -> Place | None:
    """Return where to try: on usable nodes first, in a partition that Muri serves; None where no node has GPUs.

    Args:
        nodes: All nodes.
        partitions: Partitions that Muri serves, empty for all.
    """
    best = min(
        (
            (not node.usable, partition, node.gpu_type)
            for node in nodes
            for partition in node.partitions
            if node.gpu_count and (not partitions or partition in partitions)
        ),
        default=None,
    )
    return None if best is None else Place(best[1], best[2], partitions)


def find_gpu_removal(
    commands: SlurmCommands,
    known: GpuRemoval,
    place: Place,
    waiting: Job | None,
    now_s: float,
    clock: Clock = MACHINE_CLOCK,
) -> GpuRemoval:
    """Return the known answer if it still holds, else try, as root; for the arguments see `Gateway.gpu_removal`.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    settings = slurm_settings(commands)
    site = "; ".join(f"{name}={settings.get(name, '')}" for name in _SITE)
    site += f"; partitions={','.join(place.served)}"
    if known.holds(site, now_s):
        return known
    probe = _Probe(commands, place, waiting, clock)
    with suppress(GatewayError):  # left by a controller that was killed; users may have jobs of that name
        commands.run("cancel old probes", ["scancel", "--user=root", f"--name={PROBE_NAME}"])
    forms = tuple(probe.tried(form) for form in _forms(place, PER_NODE))
    for each in forms:
        log.info("GPUs asked for by %s: %s", each.form, f"taken away by {each.request}" if each.request else each.why)
    return GpuRemoval(site, now_s, forms, "")


def try_every_form(commands: SlurmCommands, place: Place) -> tuple[TriedForm, ...]:
    """Try each way of asking for GPUs, also those whose jobs always run alone, for `muri doctor`.

    Raises:
        SlurmUnreachableError: slurmctld does not answer.
    """
    probe = _Probe(commands, place, None, MACHINE_CLOCK)
    return tuple(probe.tried(form) for form in _forms(place, *EVERY_FORM))


def _forms(place: Place, *untyped: str) -> tuple[str, ...]:
    typed = (TYPED,) if place.gpu_type != "gpu" else ()
    return (*untyped, *typed)


def submit_probe(commands: SlurmCommands, *options: str) -> int:
    """Submit a held job to try a change with, and return its id.

    Raises:
        GatewayError: Slurm refused.
    """
    arguments = [
        "sbatch", "--parsable", "--hold", "--no-requeue", "--ntasks=1", "--time=1", "--chdir=/", "--output=/dev/null",
        "--export=NIL", f"--job-name={PROBE_NAME}", *options, "--wrap=exec sleep 30",
    ]  # fmt: skip
    return int(first_line(commands.run("submit a job to try with", arguments)).split(";")[0])


@contextmanager
def cancelled_afterwards(commands: SlurmCommands, job_id: int) -> Iterator[int]:
    """Cancel a job at the end of the block."""
    try:
        yield job_id
    finally:
        with suppress(GatewayError):
            commands.run(f"cancel job {job_id}", ["scancel", str(job_id)])


class _Probe:
    """Tries each form of request with jobs of its own, which never outlive the try."""

    def __init__(self, commands: SlurmCommands, place: Place, waiting: Job | None, clock: Clock) -> None:
        self._commands = commands
        self._place = place
        self._waiting = waiting
        self._clock = clock

    def tried(self, form: str) -> TriedForm:
        """Try one form of request; only a slurmctld that does not answer is an error."""
        gpu_type = self._place.gpu_type
        option = form.replace("TYPE", gpu_type).removesuffix("N") + "1"
        reasons: dict[str, str] = {}
        for way in WAYS:
            try:
                with self._held_job(option) as job_id:
                    outcome = self._outcome(job_id, way)
            except SlurmUnreachableError:
                raise
            except _NotToldError as error:
                return TriedForm(form, why=first_line(str(error)), conclusive=False)
            except GatewayError as error:
                outcome = first_line(str(error))
                if not no_such_gres(error):
                    return TriedForm(form, why=outcome, conclusive=False)
                outcome = "slurm.conf has no such GRES"
            if not outcome:
                return TriedForm(form, way)
            reasons[way] = outcome
        if len(set(reasons.values())) == 1:
            reasons = {" or ".join(reasons): next(iter(reasons.values()))}
        return TriedForm(form, why="; ".join(f"{way}: {outcome}" for way, outcome in reasons.items()))

    def _held_job(self, option: str) -> AbstractContextManager[int]:
        try:
            job_id = submit_probe(self._commands, option, f"--partition={self._place.partition}")
        except SlurmUnreachableError:
            raise
        except GatewayError:
            if self._waiting is None:
                raise
            job = self._waiting
            named = {"partition": job.partition, "account": job.account, "qos": job.qos, "reservation": job.reservation}
            own = [f"--{name}={value}" for name, value in named.items() if value]
            job_id = submit_probe(self._commands, option, f"--uid={job.uid}", f"--gid={job.gid}", *own)
        return cancelled_afterwards(self._commands, job_id)

    def _outcome(self, job_id: int, way: str) -> str:
        """Return why a way does not work, "" where it does; raise where Slurm refuses or does not tell."""
        before = self._counted(job_id)
        # A member's memory is always named: a site's default for each GPU would be nothing, or a whole node's.
        update = ["scontrol", "update", f"JobId={job_id}", f"MinMemoryNode={_MEM_MIB}"]
        try:
            self._commands.run(f"change job {job_id}", [*update, f"TresPerNode={way}"])
        except GatewayError as error:
            if "gres" not in str(error).lower() or isinstance(error, SlurmUnreachableError):
                raise
            old = way.replace("gres/", _OLD_NOTATION)  # up to Slurm 22.05
            self._commands.run(f"change job {job_id}", [*update, f"TresPerNode={old}"])
        if "gres/gpu" in before:
            return "Slurm accepts it and keeps the GPU" if "gres/gpu" in self._counted(job_id) else ""
        self._commands.run(f"release job {job_id}", ["scontrol", "release", str(job_id)])
        given = self._given(job_id)
        return "Slurm accepts it and hands out the GPU" if re.search(r"\bgpu\b", given) else ""

    def _counted(self, job_id: int) -> str:
        """Return the resources that Slurm counts for the job, such as "cpu=1,node=1,gres/gpu=1"."""
        fields = self._shown(job_id)
        return fields.get("ReqTRES", "") or fields.get("TRES", "")

    def _given(self, job_id: int) -> str:
        """Return the GRES of the job once it runs."""
        deadline_s = self._clock() + _START_TIMEOUT_S
        while self._clock() < deadline_s:
            fields = self._shown(job_id)
            if fields.get("JobState") == "RUNNING":
                return fields.get("JOB_GRES", "")
            self._clock.sleep(_POLL_S)
        raise _NotToldError(
            "its job did not start in time to show it; without GPUs among AccountingStorageTRES it has to"
        )

    def _shown(self, job_id: int) -> dict[str, str]:
        arguments = ["scontrol", "--details", "--oneliner", "show", "job", str(job_id)]
        text = self._commands.run(f"look at job {job_id}", arguments)
        return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", text)))


class _NotToldError(GatewayError):
    """Slurm did not show the outcome."""


FILE_NAME: Final = "gpu-removal.json"

_FORM: Final = TypeAdapter(GpuRemoval)
_LOOK_AGAIN_S: Final = 60.0


def read_gpu_removal(state_dir: Path) -> GpuRemoval:
    """Return the outcome that a state directory keeps; where it is missing or damaged, `NOT_TRIED`."""
    try:
        return _FORM.validate_json((state_dir / FILE_NAME).read_bytes())
    except (OSError, ValidationError):
        return NOT_TRIED


class GpuRemovalFile:
    """Tries how GPUs can be taken away, if it may, and keeps the outcome in the state directory."""

    def __init__(self, state_dir: Path, partitions: tuple[str, ...], *, may_try: bool = True) -> None:
        self._state_dir = state_dir
        self._partitions = partitions
        self._may_try = may_try
        self._looked_s = float("-inf")
        self._current = NOT_TRIED

    def current(self, gateway: Gateway, snapshot: Snapshot) -> GpuRemoval:
        """Return the present outcome; without one there are no groups.

        It is tried when a first job waits for Muri, and again when slurmctld has been restarted.
        """
        pending = (job for job in snapshot.jobs if job.state is JobState.PENDING)
        waiting = next((job for job in pending if token(job.admin_comment, REQUEST_PREFIX) is not None), None)
        if not self._may_try or waiting is None:
            return read_gpu_removal(self._state_dir)
        if 0 <= snapshot.taken_s - self._looked_s < _LOOK_AGAIN_S:
            return self._current
        self._current = self._try(gateway, snapshot, waiting)
        self._looked_s = snapshot.taken_s
        return self._current

    def _try(self, gateway: Gateway, snapshot: Snapshot, waiting: Job) -> GpuRemoval:
        known = read_gpu_removal(self._state_dir)
        place = place_for(snapshot.nodes, self._partitions)
        if place is None:  # by the configuration and today's nodes, not by Slurm: it is not kept
            served = f": {', '.join(self._partitions)}" if self._partitions else ""
            return GpuRemoval(why=f"no node with GPUs is in a partition that Muri serves{served}")
        try:
            outcome = gateway.gpu_removal(known, place, waiting, snapshot.taken_s)
        except SlurmUnreachableError:
            raise
        except GatewayError as error:
            log.warning("jobs run alone: it cannot be tried whether their GPUs can be taken away: %s", error)
            return GpuRemoval(why=str(error))
        if outcome != known:
            try:
                atomic_json(self._state_dir / FILE_NAME, asdict(outcome), mode=0o600)
            except OSError as error:
                log.warning("the outcome of taking GPUs away cannot be kept: %s", error)
        return outcome
