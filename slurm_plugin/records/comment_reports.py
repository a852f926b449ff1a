"""What jobs tell the controller through their own comments, which Slurm limits to 1,024 bytes. Pure.

A dry run's result, the speeds of a group's members, the error that ended a group, and runs that ended for lack of
GPU memory.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from muri.policies.siblings.horus_cost import MAX_RAISES
from muri.profiler import figures
from muri.profiler.cpu_curve import CpuSensitivity, Point, monotone
from muri.profiler.dryrun.messages import READS, DryRunResult
from muri.profiler.records import STAGES, ProfileError, ProfileKey, StageProfile
from muri.profiler.use import JobUse, NodeUse, OneGpu
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
    "stage_p95_s",
    "stage_cv",
    "iteration_p95_s",
    "iteration_cv",
    "busy_s",
    "cpu_cores",
    "gpu_utilisation",
    "warmup_iterations",
    "host_mem_gib",
    "gradient_mib",
    "dangers",
    "confidence",
)
"""Details in the order in which they are left out when the comment would be too long."""

DIFFERS_BY: Final = 0.2
"""A member whose measured and predicted speeds differ by more than this share is off plan."""

_DISCIPLINE: Final = "d"

_BROKEN: Final = "b"

_STEADY: Final = "c"

_USE: Final = "u"

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
    """A measured CPU axis as a dry run's result has it, short."""
    points = [[point.cpus, point.throughput, point.spread, point.measurements] for point in cpu.points]
    return {"points": points, "least": cpu.saturating_cpus, "open": cpu.undecided_cpus, "runs": cpu.measurements}


def sweep_in(told: Mapping[str, Any], most_cpus: int) -> CpuSensitivity:
    """Read what `sweep_figures` made.

    Args:
        told: What a job's comment says.
        most_cpus: The dry run had no more.

    Raises:
        SensitivityError: A figure cannot be true.
        LookupError, TypeError, ValueError: It is something else.
    """
    rows = ((int(cpus), float(rate), float(spread), int(runs)) for cpus, rate, spread, runs in told["points"])
    points = monotone(Point(*row) for row in rows)
    found = CpuSensitivity(points, int(told["least"]), int(told["open"]), int(told["runs"]))
    counts = {point.cpus for point in points}
    if found.saturating_cpus not in counts or max(counts) > most_cpus:
        raise ValueError(f"{max(counts)} CPUs were measured of {most_cpus}, and {found.saturating_cpus} are enough")
    return found


def comment_with(comment: str, token: str, result: Mapping[str, Any]) -> str:
    """Return the comment with a dry run's result in it.

    Args:
        comment: The job's comment, whose other text is kept.
        token: Name of the dry run.
        result: What it found, or an error.
    """
    if "error" in result:
        told = {"error": str(result["error"])[:_ERROR_CHARACTERS], "token": token}
        return tags.with_token(comment, tags.PROFILE_PREFIX, tags.format_json(told))
    return _with_figures(comment, tags.PROFILE_PREFIX, {**result, "token": token})


def with_measured(comment: str, result: Mapping[str, Any]) -> str:
    """Return a member's comment with what its first iterations told of its model, `Measurement.look` of the runtime."""
    told = {**result, "at": round(result["at"])}
    if "error" in result:
        return tags.with_token(comment, tags.MEASURED_PREFIX, tags.format_json(told))
    return _with_figures(comment, tags.MEASURED_PREFIX, told)


def _with_figures(comment: str, prefix: str, result: Mapping[str, Any]) -> str:
    """Write figures, without the least important ones where all would be too long."""
    values = {name: _rounded(value) for name, value in result.items() if name != "stopped"}
    for name in ("", *_DISPENSABLE):
        values["detail"] = {key: value for key, value in values.get("detail", {}).items() if key != name}
        text = tags.with_token(comment, prefix, tags.format_json(values))
        if len(text.encode(errors="surrogateescape")) <= MOST_BYTES:
            return text
    for name in (READS, SWEEP):
        values.pop(name, None)
        text = tags.with_token(comment, prefix, tags.format_json(values))
        if len(text.encode(errors="surrogateescape")) <= MOST_BYTES:
            break
    return text


def with_foreign_python(result: Mapping[str, Any], own_prefix: str) -> dict[str, Any]:
    """Return a result that names the script's Python only where it is another than that of the site.

    Args:
        result: A measurement; its "python" has the "prefix" and "executable" of the script's.
        own_prefix: The site's.
    """
    found = result.get("python")
    rest = {name: value for name, value in result.items() if name != "python"}
    if isinstance(found, Mapping) and found.get("prefix") != own_prefix:
        rest["python"] = found.get("executable")
    return rest


def profile_in(
    measured: Mapping[str, Any], key: ProfileKey, measured_at: str, ran_s: float, source: str = "dry-run"
) -> StageProfile:
    """Return the profile that a measurement holds.

    Args:
        measured: The measurement.
        key: Of what model it is.
        measured_at: When that was.
        ran_s: For how long the job has run that tells of it.
        source: What kind of job that is.

    Raises:
        ProfileError: A figure cannot be true.
        KeyError, TypeError, ValueError: One is missing or is not a number.
    """
    found = DryRunResult.from_dict(measured).profile(key, measured_at, source)
    if found.iterations * found.iteration_s > ran_s + _CLOCK_TOLERANCE_S:
        raise ProfileError(
            f"{found.iterations} iterations of {found.iteration_s:g} s take longer than the job has run ({ran_s:.0f} s)"
        )
    return found


def python_in(measured: Mapping[str, Any]) -> str:
    """Return the Python that a measurement names, "" for the site's or where it names nothing that can be one."""
    told = measured.get("python")
    return told if isinstance(told, str) and _PATH.fullmatch(told) else ""


def _rounded(value: Any) -> Any:
    """Round numbers to the digits that a measurement has."""
    if isinstance(value, float):
        return _short(value)
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What the runtime measured of one member.

    Attributes:
        iteration_s: Seconds from one iteration's end to the next, lately.
        iterations: Iterations done; None when not reported.
        stage_s: Seconds of an iteration in each stage, in the order of `STAGES`; () when not reported.
        wait_s: Seconds of an iteration waiting for each stage's resource; () when not reported.
        discipline: The discipline in force; None when not reported.
    """

    iteration_s: float
    iterations: int | None = None
    stage_s: tuple[float, ...] = ()
    wait_s: tuple[float, ...] = ()
    discipline: str | None = None

    def speed(self, solo_iteration_s: float | None) -> float | None:
        """Normalized speed: 1 = as fast as alone; None when the time alone is not known."""
        return None if solo_iteration_s is None else solo_iteration_s / self.iteration_s

    def speed_or_estimate(self, solo_iteration_s: float | None) -> float | None:
        """The same for people; for a time alone that is not known its own time without waits stands in."""
        if solo_iteration_s is not None or not self.wait_s:
            return self.speed(solo_iteration_s)
        return max(0.0, 1 - sum(self.wait_s) / self.iteration_s)


def speeds_token(status: Mapping[str, Any], steady: Collection[str] = ()) -> str | None:
    """Return the token for the pilot job's comment; None when no member has done an iteration.

    Args:
        status: Content of the runtime's status file.
        steady: The members at work, where nobody came or went for as long as the speeds were measured.
    """
    times_s = iteration_times_s(status.get("members", {}))
    if not times_s:
        return None
    members = {job_id: status["members"][job_id] for job_id in times_s}
    behind = [int(job_id) for job_id, member in members.items() if member.get("promise_broken") and job_id.isdecimal()]
    about: dict[str, Any] = {_BROKEN: behind} if behind else {}
    if steady:
        about[_STEADY] = sorted(int(job_id) for job_id in steady if job_id.isdecimal())
    report = about | {job_id: _figures(member) for job_id, member in members.items()}
    if status.get("discipline"):
        report[_DISCIPLINE] = status["discipline"]
    use = use_figures(status.get("use"))
    token = tags.SPEED_PREFIX + tags.format_json(report | ({_USE: use} if use else {}))
    if len(token) > MOST_BYTES:
        token = tags.SPEED_PREFIX + tags.format_json(report)
    if len(token) > MOST_BYTES:
        report = about | {job_id: _short(time_s) for job_id, time_s in times_s.items()}
        token = tags.SPEED_PREFIX + tags.format_json(report)
    return token


def iteration_times_s(members: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of an iteration of each member that has done one.

    Args:
        members: The members' part of the runtime's status.
    """
    return {job_id: time_s for job_id, member in members.items() if (time_s := _iteration_s(member))}


def promise_broken(report: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the members that do not get the speed that they were promised, as a pilot's report says.

    The pilot's user may have written anything into its comment.
    """
    return _ids(report, _BROKEN)


def steady_company(report: Mapping[str, Any] | None) -> frozenset[int]:
    """Return the members beside each other of whom a pilot's report tells speeds; empty where somebody came or went.

    The pilot's user may have written anything into its comment.
    """
    return frozenset(_ids(report, _STEADY))


def _ids(report: Mapping[str, Any] | None, name: str) -> tuple[int, ...]:
    told = None if report is None else report.get(name)
    ids = told if isinstance(told, list) else []
    return tuple(int(each) for each in ids if _JOB_ID.fullmatch(str(each)))


def _iteration_s(member: Mapping[str, Any]) -> float:
    rate = member.get("iterations_per_s")
    return 1 / rate if rate else float(member.get("iteration_s") or 0.0)


def use_figures(use: Any) -> dict[str, Any]:
    """Return what a pilot's monitor has found, as short as it can be; {} for nothing.

    Args:
        use: `Use.to_dict` of `muri.profiler.usage`.
    """
    if not isinstance(use, Mapping):
        return {}
    gpus = {number: [_brief(value) for value in gpu.values()] for number, gpu in use["node"]["gpus"].items()}
    node = [_brief(value) for name, value in use["node"].items() if name != "gpus"]
    jobs = {name: [_brief(value) for value in job.values()] for name, job in use["jobs"].items()}
    return {_NODE: node, _GPUS: gpus, **jobs}


def node_use(report: Mapping[str, Any] | None) -> NodeUse | None:
    """Return what a pilot's report says of its first node; None where it says nothing, or what cannot be true.

    The pilot's user may have written anything into its comment.
    """
    use = _use_in(report)
    gpus = use.get(_GPUS)
    try:
        found = {int(number): OneGpu(*values) for number, values in gpus.items()} if isinstance(gpus, Mapping) else {}
        cores, count, mem_gib, disk, network = use[_NODE]
        node = NodeUse(cores, count, mem_gib, disk, network, found)
    except (KeyError, TypeError, ValueError):
        return None
    values = [*_values_of(node), *(value for gpu in found.values() for value in _values_of(gpu))]
    shares = (gpu.utilisation or 0 for gpu in found.values())
    return node if all(map(_is_figure, values)) and all(share <= 1 for share in shares) else None


def job_use(report: Mapping[str, Any] | None, job_id: int) -> JobUse | None:
    """Return what a pilot's report says of a member's use; as `node_use`."""
    try:
        job = JobUse(*_use_in(report)[str(job_id)])
    except (KeyError, TypeError):
        return None
    return job if all(map(_is_figure, _values_of(job))) else None


def _use_in(report: Mapping[str, Any] | None) -> Mapping[str, Any]:
    use = None if report is None else report.get(_USE)
    return use if isinstance(use, Mapping) else {}


def _values_of(use: NodeUse | JobUse | OneGpu) -> list[Any]:
    return [value for each in fields(use) if each.name != "gpus" and (value := getattr(use, each.name)) is not None]


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def _brief(value: float | None) -> float | None:
    """Three digits say enough of use."""
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
    """Return what a pilot's report says of a member; None when something there cannot be true.

    The pilot's user may have written anything into its comment.
    """
    told = None if report is None else report.get(str(job_id))
    try:
        if isinstance(told, Mapping):
            discipline = None if report is None else report.get(_DISCIPLINE)
            found = MemberReport(told["t"], told["n"], tuple(told["s"]), tuple(told["w"]), discipline)
        else:
            found = MemberReport(told or 0.0)
    except (KeyError, TypeError):
        return None
    return found if _can_be_true(found) else None


def _can_be_true(report: MemberReport) -> bool:
    """Whether every figure is within what `muri.profiler.figures` allows."""
    checks = [(figures.ITERATION_S, report.iteration_s), (figures.ITERATIONS, report.iterations or 0)]
    checks += [(figures.TIME_S, value) for value in (*report.stage_s, *report.wait_s)]
    whole = {len(report.stage_s), len(report.wait_s)} <= {0, len(STAGES)}
    named = report.discipline is None or isinstance(report.discipline, str)
    return whole and named and not any(bounds.fault(value) for bounds, value in checks)


def is_off_plan(measured: float | None, predicted: float | None) -> bool:
    """Whether a member runs more than 20 % slower or faster than was planned."""
    return measured is not None and predicted is not None and abs(measured - predicted) > DIFFERS_BY * predicted


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a group's runtime ended.

    Attributes:
        cause: The error.
        culprits: Job ids of the members that may have caused it.
    """

    cause: str
    culprits: tuple[int, ...]


def fault_token(status: Mapping[str, Any]) -> str | None:
    """Return the token for the pilot job's comment; None when the runtime's status reports no fault."""
    fault = status.get("fault")
    if not isinstance(fault, dict):
        return None
    report = {"cause": str(fault.get("cause", ""))[:_LONGEST_CAUSE], "culprits": fault.get("culprits", [])}
    return FAULT_PREFIX + tags.format_json(report)


def parse_fault(comment: str) -> Fault | None:
    """Read the fault that a pilot reported in its comment; None when there was none."""
    report = tags.parse_json(tags.token(comment, FAULT_PREFIX))
    if report is None:
        return None
    culprits = report.get("culprits")
    ids = culprits if isinstance(culprits, list) else []
    # Python refuses to read a number of thousands of digits.
    return Fault(str(report.get("cause", "")), tuple(int(each) for each in ids if _JOB_ID.fullmatch(str(each))))


def out_of_memory_text(run: int, times: int) -> str:
    """Return the token's text: the run that ran out of GPU memory (0 = never requeued), and how often one has."""
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
    """What a job's own comment says.

    Attributes:
        checkpoint_run: The run (0 = never requeued) that has declared its checkpoint, None when none has.
        stopped_run: The run that was stopped on purpose, to resume from its checkpoint later.
        out_of_memory: The run that last ended for lack of GPU memory beside others, and how often.
        dry_run: A dry run's result.
        measured: What a member's first iterations told of its model.
        speeds: A pilot's report of its group's members, for `member_report`.
        fault: Why a pilot's group ended.
        unfinished: The start or dry run of which it may be a job whose submission was cut off, "" for none: Muri's own
            jobs are submitted with the tag in this comment, and it moves to AdminComment before they are released.
    """

    checkpoint_run: int | None = None
    stopped_run: int | None = None
    out_of_memory: tuple[int, int] = (-1, 0)
    dry_run: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] | None = None
    speeds: Mapping[str, Any] | None = None
    fault: Fault | None = None
    unfinished: str = ""


def read_reports(comment: str) -> JobReports:
    """Read a job's own comment; its user may have written anything into it."""
    if "muri" not in comment:
        return JobReports()
    return JobReports(
        checkpoint_run=_run_in(comment, tags.CHECKPOINT_PREFIX),
        stopped_run=_run_in(comment, tags.STOPPED_PREFIX),
        out_of_memory=out_of_memory_runs(comment),
        dry_run=tags.parse_json(tags.token(comment, tags.PROFILE_PREFIX)),
        measured=tags.parse_json(tags.token(comment, tags.MEASURED_PREFIX)),
        speeds=tags.parse_json(tags.token(comment, tags.SPEED_PREFIX)),
        fault=parse_fault(comment),
        unfinished=_unfinished(comment),
    )


def _unfinished(comment: str) -> str:
    pilot = tags.parse_pilot(comment)
    return pilot.token if pilot is not None else tags.token(comment, tags.DRY_RUN_PREFIX) or ""


def _run_in(comment: str, prefix: str) -> int | None:
    text = tags.token(comment, prefix)
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,9}", text) else None
