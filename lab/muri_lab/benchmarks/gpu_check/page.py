"""Says what the stored results of the GPU check are, in docs/testing.md and the README, for benchmarks/pages.py."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from muri.profiler.records import STAGES

RESULTS = Path(__file__).resolve().parents[1] / "results"

Found = Mapping[str, Any]

WAY_NAMES = {
    "plain": "plain processes", "mps": "MPS", "process:fair": "fair, processes", "thread:fair": "fair, threads",
    "process:auto": "auto, processes", "process:lockstep": "lockstep, processes",
}  # fmt: skip

NOTHING_YET = """\
- **Nothing has run on a GPU yet.** A stand-in for CUDA tests streams, memory admission and error handling
  ([docs/testing.md](docs/testing.md)); groups of several ranks are tested with gloo ([docs/sharing.md](docs/sharing.md)).
"""  # noqa: E501 (a line of the page)
ISOLATIONS = {"process": "processes", "thread": "threads"}


class PageError(Exception):
    """The stored results are not as they should be; the text says how."""


def losses(found: Found) -> Iterator[str]:
    """Whether members have the losses that they have alone."""
    for isolation, name in ISOLATIONS.items():
        if isolation not in found:
            continue
        members = found[isolation]["members"]
        differing = [_difference(model, each) for model, each in members.items() if not each["same"]]
        count = sum(each["iterations"] for each in members.values())
        verdict = "; ".join(differing) or f"all digits of {count} losses are as alone"
        speeds = ", ".join(f"{model} {each['speed']:.2f}" for model, each in members.items())
        yield f"{len(members)} members as {name}, `fair`, deterministic algorithms: {verdict}"
        yield f"their speeds as {name}: {speeds}; sum {found[isolation]['total']:.2f}"
    for key, text in found.items():
        if key.startswith("not deterministic"):
            yield f"{key.partition(': ')[2]} is not deterministic by itself: {text}"


def _difference(model: str, told: Found) -> str:
    first, most = told["first_difference"] + 1, told["largest_difference"]
    return f"{model} DIFFERS from iteration {first} on, by {most:.2g} at most"


def stages(found: Found) -> Iterator[str]:
    """Stage times, and how far off hooks and company are."""
    for model, each in found.get("alone", {}).items():
        parts = ", ".join(f"{stage} {each['stage_s'].get(stage, 0.0) * 1e3:.1f}" for stage in STAGES)
        kernels_s = each["profiler_s"].get("kernels")
        yield f"{model} alone, ms by its own clock and CUDA events: iteration {each['iteration_s'] * 1e3:.1f}; {parts}"
        if kernels_s:
            yield f"{model} alone, kernels by torch.profiler: {kernels_s * 1e3:.1f} ms"
    for key, name in (("hooks", "by hooks, alone"), ("in_place", "in place, in company")):
        for model, each in found.get(key, {}).items():
            if each is None:
                yield f"{model} {name}: not measured in time"
                continue
            parts = ", ".join(f"{stage} {each['errors'][stage]:+.1%}" for stage in STAGES)
            yield f"error of {model} {name}, of the iteration: {parts}; iteration {each['iteration_error']:+.1%}"
            if each["profiler_error"] is not None:
                yield f"propagate of {model} {name}, less the profiler's kernels: {each['profiler_error']:+.1%}"


def throughput(found: Found) -> Iterator[str]:
    """Total normalized throughput of each set in each way."""
    for name in ("bottlenecks", "gpu-bound", "small"):
        if name not in found:
            continue
        each = found[name]
        ways = ", ".join(f"{WAY_NAMES[way]} {_total(result)}" for way, result in each["ways"].items())
        one, all_cores = each["lp_bound"], each["lp_bound_with_all_cores"]
        yield f"sum of normalized speeds, {', '.join(each['models'])}: {ways}"
        yield f"bound of the linear program for them: {one:.2f}; {all_cores:.2f} where each core counts"


def _total(result: Found) -> str:
    if "total" in result:
        return f"{result['total']:.2f}"
    return f"failed ({str(result['error']).strip().splitlines()[-1][:100]})"


def hand_over(found: Found) -> Iterator[str]:
    """How long the GPU rests between two members."""
    names = {"alone": "between two stages of one member", "process": "between processes", "thread": "between threads"}
    for key, name in names.items():
        if key in found:
            each = found[key]
            yield f"the GPU rests {name}: {each['p50_us']:.0f} µs at p50, {each['p99_us']:.0f} µs at p99"
            if each["overlapping"]:
                yield f"holds that overlapped {name}: {each['overlapping']} of {each['count']}"


def memory(found: Found) -> Iterator[str]:
    """GPU memory of contexts and groups."""
    for number, mib in enumerate(found.get("context_mib") or [], 1):
        yield f"CUDA context number {number}: {mib:.0f} MiB"
    for isolation, name in ISOLATIONS.items():
        each = found.get(isolation)
        if not each or each["grown_mib"] is None:
            continue
        yield f"{len(each['members'])} members as {name}: {each['grown_mib']:.0f} MiB"
        if isolation == "process":  # threads see the peak of all
            peaks = [told["reserved"] for told in each["members"].values()]
            yield f"their own peaks: {sum(peaks):.0f} MiB together, {max(peaks):.0f} MiB for the largest"


def errors(found: Found) -> Iterator[str]:
    """What partners notice of a member's error."""
    kinds = {"memory": "out of memory", "access": "illegal access"}
    for isolation, name in ISOLATIONS.items():
        for kind, words in kinds.items():
            each = found.get(isolation, {}).get(kind)
            if each:
                partners = ", ".join(_became(told) for told in each["partners"].values())
                yield f"{words}, {name}: the member ends with {each['exit_code']}; its partners: {partners}"
        same = found.get(isolation, {}).get("partners_have_same_losses")
        if same is not None:
            yield f"losses of the partners, {name}: {'the same' if same else 'DIFFERENT'}"


def _became(told: Found) -> str:
    if told["exit_code"] is not None:
        return f"ends with {told['exit_code']}"
    longest_s = told["longest_iteration_s"]
    return "goes on" if longest_s is None else f"goes on, {longest_s * 1e3:.0f} ms for the longest iteration"


def nvml(found: Found) -> Iterator[str]:
    """What NVML tells by process."""
    if "unreadable" in found:
        yield f"NVML cannot be read: {found['unreadable']}"
    for model, each in found.get("members", {}).items():
        used = "no utilization" if each["utilization"] is None else f"utilization {each['utilization']:.0%}"
        held = "no memory" if each["mem_gib"] is None else f"{each['mem_gib']:.2f} GiB"
        yield f"NVML tells of {model}: {used}, {held}; PyTorch has reserved {each['reserved_gib']:.2f} GiB"
    rates = [rate for rate in found.get("pcie_mib_per_s", []) if rate is not None]
    if rates:
        yield f"PCIe traffic by NVML: {min(rates):.0f} to {max(rates):.0f} MiB/s"
    yield from found.get("notes", [])


def demo(found: Found) -> Iterator[str]:
    """How soon the demo's jobs end."""
    for way in ("one by one", "four at once", "with Muri"):
        if way in found:
            each = found[way]
            jct_s, makespan_s, first_s = each["average_jct_s"], each["makespan_s"], each["first_iteration_s"]
            yield (
                f"{len(each['jct_s'])} jobs, {way}: average JCT {jct_s:.1f} s, makespan {makespan_s:.1f} s; "
                f"the first iteration ends {first_s:.1f} s after a job's start"
            )


FILES: Mapping[str, Callable[[Found], Iterator[str]]] = {
    "losses": losses, "stages": stages, "throughput": throughput, "hand-over": hand_over, "errors": errors,
    "memory": memory, "nvml": nvml, "demo": demo,
}  # fmt: skip


def lines_of(name: str, found: Found) -> list[str]:
    """Sentences about a result; what was not measured is not in them."""
    said = list(FILES[name](found))
    return said + [
        f"FAILED: {key.partition(': ')[2]}: {text}" for key, text in found.items() if key.startswith("failed: ")
    ]


def stored() -> dict[str, Found]:
    """The results that are kept, by name."""
    found = {}
    for name in FILES:
        path = RESULTS / f"gpu-{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
            if not found[name]["gpu"]:
                raise PageError(f"{path.name} is from a run without a GPU: remove it")
    return found


def marked(page: str, results: Mapping[str, Found]) -> str:
    """The marked part of a page."""
    if page == "README.md":
        return _readme(results)
    if not results:
        return "**State: written for CUDA, tested on CPUs only.** `scripts/gpu-check` has not been run on a GPU yet.\n"
    parts = [f"**State: measured on one GPU** ({_origin(results)}).\n"]
    for name, found in results.items():
        said = "\n".join(f"- {line}" for line in lines_of(name, found))
        parts.append(f"\n{name.capitalize().replace('-', ' ')} (`benchmarks/results/gpu-{name}.json`):\n\n{said}\n")
    return "".join(parts)


def _origin(results: Mapping[str, Found]) -> str:
    names = {f"{each['gpu']}, PyTorch {each['torch']}, commit {each['machine']['commit']}" for each in results.values()}
    return "; ".join(sorted(names))


def _readme(results: Mapping[str, Found]) -> str:
    if not results:
        return NOTHING_YET
    gpus = " and ".join(sorted({str(found["gpu"]) for found in results.values()}))
    return (
        f"- **Minutes on one GPU are all it has had** ({gpus}): [docs/testing.md](docs/testing.md) has the figures.\n"
        "  Groups of several ranks are tested with gloo only ([docs/sharing.md](docs/sharing.md)).\n"
    )
