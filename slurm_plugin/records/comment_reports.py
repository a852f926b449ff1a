"""Reports of jobs to the controller in their own comments, which Slurm limits to 1,024 bytes. Pure.

A dry run's result, the speeds of a group's members, the error that ended a group, and runs that ended for lack of GPU
memory. A job's user may have written anything into its comment.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from muri.policies.siblings.horus_cost import MAX_RAISES
from muri.profiler.dryrun.messages import READS, DryRunResult
from muri.profiler.records import (
    ITERATION_S,
    ITERATIONS,
    STAGES,
    TIME_S,
    JobUse,
    NodeUse,
    OneGpu,
    ProfileError,
    ProfileKey,
    StageProfile,
)
from muri.profiler.sensitivity import CpuSensitivity, Point, monotone
from muri.slurm_plugin.records import comment_tags as tags

MOST_BYTES: Final = 1024
"""Longer comments are cut off by some sites' databases; the speeds of four members take about half of that."""

_DIGITS: Final = 4

SWEEP: Final = "cpus"
"""Name of the CPU axis in a dry run's result."""

_ERROR_CHARACTERS: Final = 300

_CLOCK_TOLERANCE_S: Final = 5.0
"""slurmctld's times are whole seconds, and the time now is another machine's."""

_DISPENSABLE: Final = (
    "stage_p95_s", "stage_cv", "iteration_p95_s", "iteration_cv", "busy_s", "cpu_cores", "gpu_utilization",
    "warmup_iterations", "host_mem_gib", "gradient_mib", "dangers", "confidence",
)  # fmt: skip
"""Details in the order in which they are left out when the comment would be too long."""

DIFFERS_BY: Final = 0.2
"""A member whose measured and predicted speeds differ by more than this share is off plan."""

PLAIN: Final = "plain"
"""Beside a node's use: the members that have not attached to the runtime, and so share without turns."""

# Keys of a pilot's report beside the members' job ids.
_DISCIPLINE: Final = "d"
_BROKEN: Final = "b"
_STEADY: Final = "c"
_USE: Final = "u"
_PLAIN: Final = "p"

# Keys of its part about use, beside the members' job ids.
_NODE: Final = "n"
_GPUS: Final = "g"

FAULT_PREFIX: Final = "muri-fault:"

_PATH: Final = re.compile(r"/[^\x00-\x1f\x7f\ud800-\udfff]{1,1000}")
_JOB_ID: Final = re.compile("[0-9]{1,10}")

_MOST: Final = 1e7
"""No node uses more of anything: cores, GiB, MiB per second."""

_LONGEST_CAUSE: Final = 200
"""Characters; the whole comment must stay within `MOST_BYTES`."""


def sweep_figures(cpu: CpuSensitivity) -> dict[str, Any]:
    """Return a measured CPU axis in the short form of a dry run's result."""
    points = [[point.cpus, point.throughput, point.spread, point.measurements] for point in cpu.points]
    return {"points": points, "least": cpu.saturating_cpus, "open": cpu.undecided_cpus, "runs": cpu.measurements}


def sweep_in(report: Mapping[str, Any], most_cpus: int) -> CpuSensitivity:
    """Read the result of `sweep_figures` from a job's comment; the dry run had `most_cpus`.

    Raises:
        SensitivityError: A figure cannot be true.
        LookupError, TypeError, ValueError: It is malformed.
    """
    rows = ((int(cpus), float(rate), float(spread), int(runs)) for cpus, rate, spread, runs in report["points"])
    points = monotone(Point(*row) for row in rows)
    sweep = CpuSensitivity(points, int(report["least"]), int(report["open"]), int(report["runs"]))
    counts = {point.cpus for point in points}
    if sweep.saturating_cpus not in counts or max(counts) > most_cpus:
        raise ValueError(f"{max(counts)} CPUs were measured of {most_cpus}, and {sweep.saturating_cpus} are enough")
    return sweep


def comment_with(comment: str, token: str, result: Mapping[str, Any]) -> str:
    """Return the job's comment with the result or error of a dry run, named by its token, in it."""
    if "error" in result:
        report = {"error": str(result["error"])[:_ERROR_CHARACTERS], "token": token}
        return tags.with_token(comment, tags.PROFILE_PREFIX, tags.format_json(report))
    return _with_figures(comment, tags.PROFILE_PREFIX, {**result, "token": token})


def with_measured(comment: str, result: Mapping[str, Any]) -> str:
    """Return a member's comment with its model's figures, `Measurement.look` of the runtime."""
    report = {**result, "at": round(result["at"])}
    if "error" in result:
        return tags.with_token(comment, tags.MEASURED_PREFIX, tags.format_json(report))
    return _with_figures(comment, tags.MEASURED_PREFIX, report)


def _with_figures(comment: str, prefix: str, result: Mapping[str, Any]) -> str:
    """Write figures, without the least important ones where all would be too long."""
    values = {name: _rounded(value) for name, value in result.items() if name != "stopped"}
    for name in ("", *_DISPENSABLE, READS, SWEEP):
        values["detail"] = {key: value for key, value in values.get("detail", {}).items() if key != name}
        if name in (READS, SWEEP):
            values.pop(name, None)
        text = tags.with_token(comment, prefix, tags.format_json(values))
        if len(text.encode(errors="surrogateescape")) <= MOST_BYTES:
            break
    return text


def with_foreign_python(result: Mapping[str, Any], own_prefix: str) -> dict[str, Any]:
    """Return a measurement that names the script's Python only where its prefix is not the site's own."""
    python = result.get("python")
    rest = {name: value for name, value in result.items() if name != "python"}
    if isinstance(python, Mapping) and python.get("prefix") != own_prefix:
        rest["python"] = python.get("executable")
    return rest


def profile_in(
    measured: Mapping[str, Any], key: ProfileKey, measured_at: str, ran_s: float, source: str = "dry-run"
) -> StageProfile:
    """Return the profile in a measurement.

    Args:
        measured: The measurement.
        key: The model's.
        measured_at: When it was made.
        ran_s: How long the reporting job has run.
        source: The kind of that job.

    Raises:
        ProfileError: A figure cannot be true.
        KeyError, TypeError, ValueError: One is missing or is not a number.
    """
    profile = DryRunResult.from_dict(measured).profile(key, measured_at, source)
    if profile.iterations * profile.iteration_s > ran_s + _CLOCK_TOLERANCE_S:
        raise ProfileError(
            f"{profile.iterations} iterations of {profile.iteration_s:g} s take longer than the job has run "
            f"({ran_s:.0f} s)"
        )
    return profile


def python_in(measured: Mapping[str, Any]) -> str:
    """Return the Python that a measurement names, "" for the site's or where it cannot be one."""
    path = measured.get("python")
    return path if isinstance(path, str) and _PATH.fullmatch(path) else ""


def _rounded(value: Any) -> Any:
    """Round numbers to the digits of a measurement."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class MemberReport:
    """The runtime's measurement of one member; None and () where not reported."""

    iteration_s: float  # From one iteration's end to the next, lately
    iterations: int | None = None  # Iterations done
    stage_s: tuple[float, ...] = ()  # Seconds of an iteration in each stage, in the order of `STAGES`
    wait_s: tuple[float, ...] = ()  # Seconds of an iteration waiting for each stage's resource
    discipline: str | None = None  # The discipline in force

    def speed(self, solo_iteration_s: float | None) -> float | None:
        """Return the normalized speed: 1 = as fast as alone; None when the time alone is not known."""
        return None if solo_iteration_s is None else solo_iteration_s / self.iteration_s

    def speed_or_estimate(self, solo_iteration_s: float | None) -> float | None:
        """Return the speed for people; its own time without waits replaces an unknown time alone."""
        if solo_iteration_s is not None or not self.wait_s:
            return self.speed(solo_iteration_s)
        return max(0.0, 1 - sum(self.wait_s) / self.iteration_s)


def speeds_token(status: Mapping[str, Any], steady: Collection[str] = ()) -> str | None:
    """Return the tag for the pilot job's comment; None without an iteration and a member that shares plainly.

    Args:
        status: Content of the runtime's status file.
        steady: The running members, where membership did not change while the speeds were measured.
    """
    times_s = iteration_times_s(status.get("members", {}))
    use = status.get("use")
    plain = [job_id for job_id in use.get(PLAIN, ()) if job_id not in times_s] if isinstance(use, Mapping) else []
    if not times_s and not plain:
        return None
    members = {job_id: status["members"][job_id] for job_id in times_s}
    behind = [int(job_id) for job_id, member in members.items() if member.get("promise_broken") and job_id.isdecimal()]
    about: dict[str, Any] = {_BROKEN: behind} if behind else {}
    if plain:
        about[_PLAIN] = sorted(int(job_id) for job_id in plain)
    if steady:
        about[_STEADY] = sorted(int(job_id) for job_id in steady if job_id.isdecimal())
    report = about | {job_id: _figures(member) for job_id, member in members.items()}
    if status.get("discipline"):
        report[_DISCIPLINE] = status["discipline"]
    figures = use_figures(use)
    brief = about | {job_id: _short(time_s) for job_id, time_s in times_s.items()}
    texts = (
        tags.SPEED_PREFIX + tags.format_json(each) for each in (report | ({_USE: figures} if figures else {}), report)
    )
    short_enough = (text for text in texts if len(text) <= MOST_BYTES)
    return next(short_enough, tags.SPEED_PREFIX + tags.format_json(brief))


def iteration_times_s(members: Mapping[str, Any]) -> dict[str, float]:
    """Return the iteration time of each member of the runtime's status that has done one."""
    return {job_id: time_s for job_id, member in members.items() if (time_s := _iteration_s(member))}


def promise_broken(report: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the members of a pilot's report that are slower than their guaranteed minimum speed."""
    return _ids(report, _BROKEN)


def steady_company(report: Mapping[str, Any] | None) -> frozenset[int]:
    """Return the members whose speeds a pilot's report covers; empty if membership changed."""
    return frozenset(_ids(report, _STEADY))


def sharing_plainly(report: Mapping[str, Any] | None) -> frozenset[int]:
    """Return the members of a pilot's report that have not attached to the runtime."""
    return frozenset(_ids(report, _PLAIN))


def _ids(report: Mapping[str, Any] | None, name: str) -> tuple[int, ...]:
    ids = None if report is None else report.get(name)
    # Python refuses to read a number of thousands of digits.
    return tuple(int(each) for each in (ids if isinstance(ids, list) else []) if _JOB_ID.fullmatch(str(each)))


def _iteration_s(member: Mapping[str, Any]) -> float:
    rate = member.get("iterations_per_s")
    return 1 / rate if rate else float(member.get("iteration_s") or 0.0)


def use_figures(use: Any) -> dict[str, Any]:
    """Return the findings of a pilot's monitor (`Use.to_dict`), as short as possible; {} for nothing."""
    if not isinstance(use, Mapping):
        return {}
    gpus = {number: [_brief(value) for value in gpu.values()] for number, gpu in use["node"]["gpus"].items()}
    node = [_brief(value) for name, value in use["node"].items() if name != "gpus"]
    jobs = {name: [_brief(value) for value in job.values()] for name, job in use["jobs"].items()}
    return {_NODE: node, _GPUS: gpus, **jobs}


def node_use(report: Mapping[str, Any] | None) -> NodeUse | None:
    """Return the use of a pilot's first node; None where its report says nothing of it, or what cannot be true."""
    use = _use_in(report)
    by_gpu = use.get(_GPUS)
    try:
        rows = by_gpu.items() if isinstance(by_gpu, Mapping) else ()
        gpus = {int(number): OneGpu(*values) for number, values in rows}
        cores, count, mem_gib, disk, network = use[_NODE]
        node = NodeUse(cores, count, mem_gib, disk, network, gpus)
    except (KeyError, TypeError, ValueError):
        return None
    possible = all(_can_be_used(gpu) and (gpu.utilization or 0) <= 1 for gpu in gpus.values())
    return node if possible and _can_be_used(node) else None


def job_use(report: Mapping[str, Any] | None, job_id: int) -> JobUse | None:
    """Return a member's use; None where its pilot's report says nothing of it, or what cannot be true."""
    try:
        job = JobUse(*_use_in(report)[str(job_id)])
    except (KeyError, TypeError):
        return None
    return job if _can_be_used(job) else None


def _use_in(report: Mapping[str, Any] | None) -> Mapping[str, Any]:
    use = None if report is None else report.get(_USE)
    return use if isinstance(use, Mapping) else {}


def _can_be_used(use: NodeUse | JobUse | OneGpu) -> bool:
    """Whether all figures can be true."""
    values = (getattr(use, each.name) for each in fields(use) if each.name != "gpus")
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
        for value in values
        if value is not None
    )


def _brief(value: float | None) -> float | None:
    """Round to three digits, which are enough for use."""
    if value is None:
        return None
    short = float(f"{value:.3g}")
    return int(short) if short == int(short) else short


def _short(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")


def _figures(member: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n": member.get("iterations", 0),
        "t": _short(_iteration_s(member)),
        "s": [_short(member["stage_s"][stage]) for stage in STAGES],
        "w": [_short(member["wait_s"][stage]) for stage in STAGES],
    }


def member_report(report: Mapping[str, Any] | None, job_id: int) -> MemberReport | None:
    """Return the part of a pilot's report about one member; None when something in it cannot be true."""
    if report is None:
        return None
    member = report.get(str(job_id))
    try:
        if not isinstance(member, Mapping):
            return _possible(MemberReport(member or 0.0))
        stage_s, wait_s = tuple(member["s"]), tuple(member["w"])
        return _possible(MemberReport(member["t"], member["n"], stage_s, wait_s, report.get(_DISCIPLINE)))
    except (KeyError, TypeError):
        return None


def _possible(report: MemberReport) -> MemberReport | None:
    """Return the report if every figure is within the bounds of `muri.profiler.records`."""
    checks = [(ITERATION_S, report.iteration_s), (ITERATIONS, report.iterations or 0)]
    checks += [(TIME_S, value) for value in (*report.stage_s, *report.wait_s)]
    whole = {len(report.stage_s), len(report.wait_s)} <= {0, len(STAGES)}
    named = report.discipline is None or isinstance(report.discipline, str)
    return report if whole and named and not any(bounds.fault(value) for bounds, value in checks) else None


def is_off_plan(measured: float | None, predicted: float | None) -> bool:
    """Whether a member runs more than 20 % slower or faster than was planned."""
    return measured is not None and predicted is not None and abs(measured - predicted) > DIFFERS_BY * predicted


@dataclass(frozen=True, slots=True)
class Fault:
    """The error that ended a group, and the job ids of the members that may have caused it; without one, its node."""

    cause: str
    culprits: tuple[int, ...]


def fault_token(status: Mapping[str, Any]) -> str | None:
    """Return the tag for the pilot job's comment; None when the runtime's status reports no fault."""
    fault = status.get("fault")
    if not isinstance(fault, dict):
        return None
    report = {"cause": str(fault.get("cause", ""))[:_LONGEST_CAUSE], "culprits": fault.get("culprits", [])}
    return FAULT_PREFIX + tags.format_json(report)


def parse_fault(comment: str) -> Fault | None:
    """Read the fault that a pilot reported in its comment; None when there was none."""
    report = tags.parse_json(tags.token(comment, FAULT_PREFIX))
    return None if report is None else Fault(str(report.get("cause", "")), _ids(report, "culprits"))


def out_of_memory_text(run: int, times: int) -> str:
    """Return the tag's text: the run that ran out of GPU memory (0 = never requeued), and how often one has."""
    return f"{run}.{times}"


def out_of_memory_runs(comment: str) -> tuple[int, int]:
    """Return the run that last ran out of GPU memory, and how often that has happened; (-1, 0) when it never has."""
    found = re.fullmatch(r"([0-9]{1,9})\.([0-9]{1,9})", tags.token(comment, tags.OUT_OF_MEMORY_PREFIX) or "")
    return (int(found[1]), int(found[2])) if found else (-1, 0)


def may_try_again(comment: str) -> bool:
    """Whether a job that ran out of GPU memory again may try once more."""
    return out_of_memory_runs(comment)[1] < MAX_RAISES


@dataclass(frozen=True, slots=True)
class JobReports:
    """All reports in a job's own comment. Runs are counted from 0 = never requeued."""

    checkpoint_run: int | None = None  # The run that has declared its checkpoint
    stopped_run: int | None = None  # The run that was stopped on purpose, to resume from its checkpoint later
    out_of_memory: tuple[int, int] = (-1, 0)  # As `out_of_memory_runs` returns it
    dry_run: Mapping[str, Any] | None = None  # A dry run's result
    measured: Mapping[str, Any] | None = None  # Its model's profile, measured in a group
    speeds: Mapping[str, Any] | None = None  # A pilot's report of its group's members, for `member_report`
    fault: Fault | None = None  # Why a pilot's group ended
    unfinished: str = ""
    """The start or dry run of which it may be a job whose submission was cut off, "" for none: Muri's own jobs are
    submitted with the tag in this comment, and it moves to AdminComment before they are released."""


def read_reports(comment: str) -> JobReports:
    """Read a job's own comment."""
    if "muri" not in comment:
        return JobReports()
    pilot = tags.parse_pilot(comment)
    return JobReports(
        checkpoint_run=_run_in(comment, tags.CHECKPOINT_PREFIX),
        stopped_run=_run_in(comment, tags.STOPPED_PREFIX),
        out_of_memory=out_of_memory_runs(comment),
        dry_run=tags.parse_json(tags.token(comment, tags.PROFILE_PREFIX)),
        measured=tags.parse_json(tags.token(comment, tags.MEASURED_PREFIX)),
        speeds=tags.parse_json(tags.token(comment, tags.SPEED_PREFIX)),
        fault=parse_fault(comment),
        unfinished=pilot.token if pilot is not None else tags.token(comment, tags.DRY_RUN_PREFIX) or "",
    )


def _run_in(comment: str, prefix: str) -> int | None:
    text = tags.token(comment, prefix)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
