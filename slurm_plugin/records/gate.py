"""What keeps a waiting job until Muri starts it: a license that a reservation withholds, or a hold.

The reservation is a lease: the controller extends it in every cycle, and when it ends, Slurm starts every waiting job
by itself. Jobs keep their priority meanwhile, and their holds belong to users and administrators alone. Sites whose
Slurm has no such license use Muri's own hold instead.
"""

import re
from typing import Final, Literal

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, JobState, Snapshot

GATE_LICENSE: Final = "muri_gate"
"""Name of the license, and of the reservation that withholds it."""

Gate = Literal["licence", "hold"]
"""What kind of gate a job was submitted with."""

OPEN: Final = "open"
"""What stands in place of a gate's kind once Muri has lifted its own hold: a later hold is somebody else's."""

REQUEUED: Final = "requeued"
"""What stands there from before Muri puts a running job back into the queue, held: that hold is its own."""

REQUEUED_HELD: Final = "job_requeued_in_held_state"
"""Slurm's reason of a hold by `scontrol requeuehold`: by a member, the controller, or anybody else who may."""

_HELD_BY_USER: Final = "JobHeldUser"
"""Slurm's reason of the hold that job_submit or a user made. Administrators' holds and failed launches have others."""


def without_gate(licenses: str) -> str:
    """Return the licenses that the user asked for."""
    if licenses == f"{GATE_LICENSE}:1":  # as most jobs have it
        return ""
    return ",".join(each for each in _each(licenses) if _name(each) != GATE_LICENSE)


def with_gate(licenses: str) -> str:
    """Return the user's licenses and Muri's."""
    return ",".join(filter(None, (without_gate(licenses), f"{GATE_LICENSE}:1")))


def gate_of(job: Job) -> Gate:
    """Return what kind of gate a job was submitted with."""
    return "licence" if gate_word(job) == tags.LICENCE_GATE else "hold"


def is_behind_licence(job: Job) -> bool:
    """Whether a job asks for Muri's license."""
    return GATE_LICENSE in job.licenses and any(_name(each) == GATE_LICENSE for each in _each(job.licenses))


def is_behind_own_hold(job: Job) -> bool:
    """Whether a job's hold is Muri's own, as far as Slurm tells.

    A job without the gate's word was held by a Muri that knew no other gate. Once Muri has lifted its hold, later ones
    are others'; but a member puts itself back into the queue, held, and its user cannot write the word that says so.
    """
    if job.state is not JobState.PENDING or not job.held or tags.USER_HOLD in job.admin_comment.split():
        return False
    word = gate_word(job)
    if word is None and is_behind_licence(job):
        return False  # its comment was damaged: the license is its gate, and somebody else holds it
    if word == OPEN or (word == "hold" and job.reason == REQUEUED_HELD):
        return job.reason == REQUEUED_HELD and tags.is_member(job.admin_comment)
    return word in {None, "hold", REQUEUED} and job.reason in {REQUEUED_HELD, _HELD_BY_USER}


def gate_word(job: Job) -> str | None:
    """Return the word that says how a job's gate stands, None where an older Muri wrote none."""
    return tags.token(job.admin_comment, tags.GATE_PREFIX)


def is_lifted(job: Job) -> bool:
    """Whether Muri's own hold on a waiting job is lifted without its gate's word saying so."""
    return job.state is JobState.PENDING and not job.held and gate_word(job) in {"hold", REQUEUED}


def lease_end_s(snapshot: Snapshot) -> float:
    """Return when the reservation ends that withholds the license, seconds since the epoch; 0 when there is none."""
    return next((each.end_s for each in snapshot.reservations if each.name == GATE_LICENSE), 0.0)


def with_word(admin_comment: str, word: str) -> str:
    """Return an AdminComment that says how its job's gate stands."""
    return tags.with_token(admin_comment, tags.GATE_PREFIX, word)


def _each(licenses: str) -> list[str]:
    # Slurm 26.05 joins the licenses of a requeued job with semicolons.
    return [each for each in re.split("[,;]", licenses) if each]


def _name(license_text: str) -> str:
    return license_text.partition("@")[0].partition(":")[0].strip()
