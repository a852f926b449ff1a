"""Words of 0.2 that 0.3 still reads, in muri.yaml, in jobs' AdminComments and in the journal; 0.4 will not."""

from typing import Final

OLD_KEYS: Final = {
    "host.start_timeout_s": "pilot.start_timeout_s",
    "host.attach_timeout_s": "pilot.attach_timeout_s",
    "host.telemetry_s": "pilot.telemetry_s",
    "host.poll_s": "pilot.poll_s",
    "host.hang_timeout_s": "pilot.hang_timeout_s",
    "host.trace": "pilot.trace",
}
"""Old keys of muri.yaml, and what each is called now."""

OLD_TAGS: Final = {"muri-pilot:": "muri-host:"}
"""Prefixes of tags in AdminComments, and how 0.2 wrote each."""

OLD_PILOT: Final = "host"
"""How 0.2 names the pilot in a member's tag. 0.3 writes both names: an upgrade begins with the controller's machine, so
nodes may still run 0.2."""

OLD_JOIN_FIELDS: Final = {"host": "pilot", "host_limit_s": "pilot_limit_s"}
"""Old fields of the journal's joins, and what each is called now."""
