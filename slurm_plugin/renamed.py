"""Names of 0.2 in muri.yaml, in jobs' AdminComments and in the journal; 0.4 will not know them."""

from collections.abc import Mapping
from typing import Any, Final

OLD_KEYS: Final = {
    "grouping.pilot_qos": "pilot.qos",
    "host.hang_timeout_s": "pilot.hang_timeout_s",
    "host.trace": "pilot.trace",
}
"""Old keys of muri.yaml, and what each is called now."""

FIXED_KEYS: Final[Mapping[str, Any]] = {
    "events.gather_s": 1.0,
    "events.least_gap_s": 5.0,
    "events.most_share": 0.2,
    "events.ends_poll_s": 5.0,
    "gate_watch_s": 60.0,
    "cycle_limit_s": 300.0,
    "cycle_calls": 2000,
    "grouping.wait_for_profiles_s": 60.0,
    "preemption.restart_s": 60.0,
    "profiling.iterations": 40,
    "profiling.warmup": "auto",
    "profiling.steady_s": 60.0,
    "profiling.attempts": 2,
    "profiling.retry_after_s": 86400.0,
    "profiling.start_timeout_s": 600.0,
    "profiling.least_confidence": 0.1,
    "profiling.use_estimates": True,
    "profiles.drift_limit": 0.2,
    "profiles.drift_after_s": 1800.0,
    "profiles.drift_again_s": 21600.0,
    "profiles.journal": "auto",
    "host.start_timeout_s": 180.0,
    "host.attach_timeout_s": 300.0,
    "host.telemetry_s": 300.0,
    "host.poll_s": 30.0,
}
"""Removed keys of muri.yaml, and what 0.3 always does: as by default in 0.2."""

GONE_KEYS: Final = {"grouping.joinable_share": "members bring their own CPUs and memory"}
"""Removed keys of muri.yaml whatever value they have, and what makes each pointless."""

POLICY_KEYS: Final[Mapping[str, tuple[str, Any]]] = {
    "grouping.ordering": ("ordering", "best"),
    "grouping.method": ("grouping", "default"),
    "grouping.matching": ("matching", "certified"),
    "grouping.objective": ("objective", "default"),
    "grouping.speed_model": ("speed_model", "default"),
    "grouping.min_speedup": ("min_speedup", 1.0),
    "tiresias.queue_limits_gpu_s": ("queue_limits_gpu_s", [3250.0, 7200.0]),
    "tiresias.promote_after": ("promote_after", 8.0),
    "tiresias.service_history_gpu_s": ("service_history_gpu_s", []),
    "horus.memory_weight": ("horus_memory_weight", 0.5),
    "horus.slowdown_weight": ("horus_slowdown_weight", 0.5),
    "horus.jobs_per_round": ("horus_jobs_per_round", 32),
    "horus.queues": ("horus_queues", 3),
}
"""Removed keys of muri.yaml that are options of the policy now, with the option and the default of 0.2."""

OLD_TAGS: Final = {"muri-pilot:": "muri-host:"}
"""Prefixes of tags in AdminComments, and how 0.2 wrote each."""

OLD_GATE: Final = "licence"
"""How 0.2 spells `gate: license`, in muri.yaml, in job_submit.lua and in AdminComments. 0.3 still writes it into
AdminComments: a member that ends on a node with 0.2 is held for ever if its gate has another word."""

OLD_PILOT: Final = "host"
"""How 0.2 names the pilot in a member's tag. 0.3 writes both names: an upgrade begins with the controller's machine, so
nodes may still run 0.2."""

OLD_JOIN_FIELDS: Final = {"host": "pilot", "host_limit_s": "pilot_limit_s"}
"""Old fields of the journal's joins, and what each is called now."""
