"""What keeps a waiting job until Muri starts it: a licence that a reservation withholds, or a hold.

The reservation is a lease: the controller extends it in every cycle, and when it ends, Slurm starts every waiting job
by itself. Jobs keep their priority meanwhile, and their holds belong to users and administrators alone. Sites whose
Slurm has no such licence use Muri's own hold instead.
"""

from typing import Final, Literal

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot

GATE_LICENSE: Final = "muri_gate"
"""Name of the licence, and of the reservation that withholds it."""

Gate = Literal["licence", "hold"]
"""What kind of gate a job was submitted with."""

OPEN: Final = "open"
"""What stands in place of a gate's kind once Muri has lifted its own hold: a later hold is somebody else's."""

_OWN_HOLD_REASONS: Final = frozenset({"JobHeldUser", "job_requeued_in_held_state", "job requeued in held state"})
"""Slurm's reasons of a hold that job_submit, a member's requeue or `scontrol uhold` made. Administrators' holds,
failed launches and dependencies that never come true have others."""


def without_gate(licenses: str) -> str:
    """Return the licences that the user asked for."""
    return ",".join(each for each in licenses.split(",") if each and _name(each) != GATE_LICENSE)


def with_gate(licenses: str) -> str:
    """Return the user's licences and Muri's."""
    return ",".join(filter(None, (without_gate(licenses), f"{GATE_LICENSE}:1")))


def gate_of(job: Job) -> Gate:
    """Return what kind of gate a job was submitted with."""
    return "licence" if tags.token(job.admin_comment, tags.GATE_PREFIX) == "licence" else "hold"


def is_behind_licence(job: Job) -> bool:
    """Whether a job asks for Muri's licence."""
    return any(_name(each) == GATE_LICENSE for each in job.licenses.split(","))


def is_behind_own_hold(job: Job) -> bool:
    """Whether a job's hold is Muri's own, as far as Slurm tells.

    A job without the gate's word was held by a Muri that knew no other gate.
    """
    own = tags.token(job.admin_comment, tags.GATE_PREFIX) in (None, "hold")
    return own and job.state is JobState.PENDING and job.held and job.reason in _OWN_HOLD_REASONS


def lease_end_s(snapshot: Snapshot) -> float:
    """Return when the reservation ends that withholds the licence, seconds since the epoch; 0 when there is none."""
    return next((each.end_s for each in snapshot.reservations if each.name == GATE_LICENSE), 0.0)


def _name(license_text: str) -> str:
    return license_text.partition("@")[0].partition(":")[0].strip()
