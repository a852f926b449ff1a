"""Keeps in the journal what GPU time jobs have had, run by run; asks the accounts about runs that nobody saw."""

import logging
from collections.abc import Mapping
from typing import Any

from muri.slurm_plugin.gateway.accounting import Accounting, NoAccountingError
from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.planning.history import Service, gaps, noted, with_accounts
from muri.slurm_plugin.records.journal import SERVICE, Journal
from muri.slurm_plugin.records.roles import View
from muri.slurm_plugin.records.usage import Run

log = logging.getLogger("muri.controller")


def read_service(facts: Mapping[str, Any]) -> dict[int, Service]:
    """Read the journal's facts, by job id; a damaged one is left out."""
    found: dict[int, Service] = {}
    for subject, fact in facts.items():
        try:
            found[int(subject)] = Service.of(fact)
        except (KeyError, TypeError, ValueError):
            log.exception("the earlier runs of job %r cannot be read and are left out", subject)
    return found


def note_service(journal: Journal, accounting: Accounting, view: View) -> None:
    """Write down what runs, and look runs up that the controller has missed: one call after all else of a cycle."""
    before = journal.facts(SERVICE)
    known = noted(read_service(before), view)
    missed = gaps(known, view, journal.intents())
    if missed and (runs := _runs_of(accounting, [view.jobs[job_id].name_in_slurm for job_id in missed])) is not None:
        known = with_accounts(known, missed, runs, view)
    facts = {str(job_id): service.fact for job_id, service in known.items()}
    if facts != before:
        journal.replace_facts({SERVICE: facts})


def _runs_of(accounting: Accounting, names: list[str]) -> list[Run] | None:
    """What the accounts tell; nothing where there are none, None when that has to wait for the next cycle."""
    try:
        return accounting.runs_of(names)
    except NoAccountingError:
        return []
    except GatewayError as error:
        log.warning("earlier runs of jobs are looked up in the next cycle: %s", error)
        return None
