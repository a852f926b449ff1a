"""What docs/compatibility.md says, from what benchmarks/compatibility.py found."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

_wrapped = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)

LEAST_SHARE = 0.9  # Share of an iteration that a profile should find in stages

_HEAD = """# Compatibility

`python -m muri_lab.benchmarks.pages` writes this page; do not edit it.

Training scripts that were not written for Muri, each compared with itself alone under plain Python, on Python {python}
({cores} cores, commit {commit}). A run is *the same* if it has the same losses (all digits of each), the same number of
optimizer steps (counted from outside of the script), the same exit code, the same files with the same contents, and the
same output without times, dates, process ids and ports. Each run uses one thread for OpenMP and MKL.

| way | the same as alone |
|---|---|
{counts}

In groups with isolation process each script runs where it runs alone: its `muri run` gets a gate from the group's
runtime and becomes the script, which takes turns with the others. What `torchrun` and `accelerate launch` start takes
no turns ([scripts](scripts.md)). With isolation thread a script runs as a thread of the runtime's own process
([shared process](shared-process.md)). Each script runs beside others, drawn at random (seed {seed}), in {rounds}
group(s) of two to four. Scripts that are here with and without gradient accumulation (Hugging Face Trainer, accelerate,
nanoGPT, timm) also run beside their twin.

## Scripts

| script | from | version | optimizer steps | losses | files | in stages | `muri run` | process | thread |
|---|---|---|---|---|---|---|---|---|---|
{rows}

The last three columns count the runs that were the same, of all, those beside a twin included. A script is compared on
the output that two plain runs of it share; the rest is listed below.

### Threads

{admitted}

### Stages

{stages}

### What varies in plain runs

{varying}
{frozen}"""

_TAIL = """
## Other checks of the same promise

`python -m muri_lab.benchmarks.soak` (20 minutes) lets short jobs come and go in one group, and signals, pauses,
cancels and kills them, their workers and their `muri run` at random. Every loss of a survivor must be that of the
same job alone, and nothing may be left.

## How to run it

Clone each of these into clones/owner/name: {repositories}.

    python -m muri_lab.benchmarks.compatibility --setup
    python -m muri_lab.benchmarks.compatibility --repositories clones --jobs 2 --write
    python -m muri_lab.benchmarks.pages

Lightning numbers its log folders by the job id where there is one, so all runs of a script have the same one. Data
sets and pretrained models are replaced by small local files of the same format
(`lab/muri_lab/benchmarks/compatibility_data.py`). `lab/muri_lab/benchmarks/compatibility_scripts.yaml` has each
script's arguments, and the edits where a script asks for a GPU, sets no seed or cannot be told to stop.
"""


def page_of(result: Mapping[str, Any]) -> str:
    """The page."""
    scripts = result["scripts"]
    head = _HEAD.format(
        **result["machine"], seed=result["seed"], rounds=result["rounds"],
        counts="\n".join(f"| {_way(way)} | {same} of {of} |" for way, (same, of) in result["counts"].items() if of),
        rows="\n".join(map(_row, scripts)), stages=_stages(scripts), admitted=_admitted(scripts),
        varying="\n".join(filter(None, map(_varying, scripts))) or "- nothing", frozen="".join(map(_frozen, scripts)),
    )  # fmt: skip
    sources = sorted({script["source"] for script in scripts if "/" in script["source"]})
    return head + _differences(scripts) + _TAIL.format(repositories=", ".join(sources))


def _names(scripts: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(each["name"] for each in scripts) or "none"


def _admitted(scripts: Sequence[Mapping[str, Any]]) -> str:
    safe = [each for each in scripts if each["dangers"] == []]
    slow = [each for each in scripts if each["dangers"] and each["thread"]]
    unknown = [each for each in scripts if each["dangers"] is None]
    rest = len(scripts) - len(safe) - len(slow) - len(unknown)
    return _wrapped(
        "A dry run of each script, as the controller makes it, tells its [dangers](shared-process.md#dangers) to"
        f" others in one process. It found none in {len(safe)} scripts ({_names(safe)}): they may be threads under"
        " `isolation: auto`. In"
        f" {len(slow)} it found only `interpreter`: threads would be slow, and `auto` makes them processes. Here they"
        f" run as threads, too, which is the stronger test ({_names(slow)}). {rest} are kept out, and the column"
        f" *thread* names why. Of {len(unknown)} a dry run knows nothing; they are kept out, too ({_names(unknown)})."
    )


def _stages(scripts: Sequence[Mapping[str, Any]]) -> str:
    measured = [each for each in scripts if each["stage_share"] is not None]
    less = [each for each in measured if each["stage_share"] < LEAST_SHARE]
    told = _wrapped(
        "*In stages* is the share of an iteration that the same dry run finds in the four stages."
        f" It measured {len(measured)} of {len(scripts)} scripts. In {len(measured) - len(less)} of them the share is"
        f" {LEAST_SHARE:.0%} or more. For the others this is its account of the rest of the iteration, or why it"
        " measured nothing:"
    )
    lines = [f"- {each['name']}, {1e3 * each['iteration_s']:.2g} ms an iteration: {each['no_stage']}" for each in less]
    lines += [f"- {each['name']}: {each['no_stage']}" for each in scripts if each["stage_share"] is None]
    return "\n".join([told, "", *(lines or ["- nothing"])])


def _way(way: str) -> str:
    if way == "muri run":
        return "alone under `muri run`"
    isolation, _, twins = way.partition(" ")
    return f"beside a twin, isolation {isolation}" if twins else f"in drawn groups, isolation {isolation}"


def _row(script: Mapping[str, Any]) -> str:
    plain = [script[name] for name in ("name", "source", "version", "steps", "losses", "files")]
    share = "–" if script["stage_share"] is None else f"{script['stage_share']:.0%}"
    thread = _share(script["thread"]) if script["thread"] else _kept_out(script["dangers"])
    cells = [*plain, share, "differs" if script["muri_run"] else "the same", _share(script["process"]), thread]
    return f"| {' | '.join(map(str, cells))} |"


def _share(runs: Sequence[Mapping[str, Any]]) -> str:
    admitted = [run for run in runs if run["admitted"]]
    if not admitted:
        return "sent back" if runs else "–"
    return f"{sum(not run['differences'] for run in admitted)} of {len(admitted)}"


def _kept_out(dangers: Sequence[str] | None) -> str:
    return "unknown" if dangers is None else ", ".join(dangers) or "–"


def _varying(script: Mapping[str, Any]) -> str:
    found = [] if script["losses_repeat"] else ["losses (not deterministic alone)"]
    found += [f"`{name}`" for name in script["files_vary"]]
    for stream, name in (("out", "output"), ("err", "error output")):
        how = script[f"{stream}_repeats"]
        found += [] if how == "all" else [f"numbers in its {name}" if how == "words" else f"its {name}"]
    return f"- {script['name']}: {', '.join(found)}" if found else ""


def _frozen(script: Mapping[str, Any]) -> str:
    times = script["plain_frozen"]
    return f"- {script['name']}: with plain Python it froze {times} time(s) and was run again\n" if times else ""


def _differences(scripts: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for script in scripts:
        runs = [("`muri run`", {"with": [], "differences": script["muri_run"]})]
        runs += [(way, run) for way in ("process", "thread") for run in script[way]]
        for way, run in runs:
            if run["differences"]:
                beside = f" beside {', '.join(run['with'])}" if run["with"] else ""
                told = "; ".join(each.replace("|", "\\|")[:160] for each in run["differences"][:3])
                lines.append(f"- {script['name']}, {way}{beside}: {told}")
    return f"\n## What differed\n\n{chr(10).join(lines)}\n" if lines else ""
