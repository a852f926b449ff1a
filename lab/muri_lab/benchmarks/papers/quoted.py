"""Figures of other benchmarks that rows of lab/papers/*.yaml quote by name, as "{forty_runs}"."""

import json
import re
from functools import cache
from statistics import fmean
from typing import Any, Final

from muri_lab.benchmarks.papers.frame import RESULTS

_NAME: Final = re.compile(r"\{(\w+)\}")


def quote(text: str, figures: dict[str, str]) -> str:
    """The text with figures in place of their names."""
    return _NAME.sub(lambda found: figures[found[1]], text)


@cache
def quoted() -> dict[str, str]:
    """All figures by name, as they stand in benchmarks/results."""
    return {**_interleaving(), **_threads(), **_scale(), **_fidelity()}


def _stored(name: str) -> Any:
    return json.loads((RESULTS.parent / f"{name}.json").read_text(encoding="utf-8"))


def _percent(share: float, how: str) -> str:
    return f"{share:{how}%}".replace("-", "−").replace("%", " %")


def _interleaving() -> dict[str, str]:
    stored, scale = _stored("interleaving"), _stored("scale")
    equal, (unequal,) = stored["equal"]["figures"]["set"], stored["unequal"]["figures"].values()
    ways = ("plain", "lockstep", "fair", "fair-processes", "auto-processes")
    hand_overs = {way: scale[f"hand-over-{way}"]["figures"]["p50_us"] for way in ("threads", "processes")}
    return {
        **{f"equal_{way.replace('-', '_')}": f"{equal[way]['total']:.2f}" for way in ways},
        **{f"unequal_{way.replace('-', '_')}": f"{unequal[way]['ratio']:.2f}" for way in ways},
        **{f"hand_over_{way}": f"{p50_us:.0f}" for way, p50_us in hand_overs.items()},
    }


def _threads() -> dict[str, str]:
    scripts = _stored("compatibility")["scripts"]
    return {"scripts": str(len(scripts)), "thread_scripts": str(sum(script["dangers"] == [] for script in scripts))}


def _scale() -> dict[str, str]:
    return {"decision_s": f"{_stored('scale')['decide-10k']['figures']['cpu_s']:.1f}"}


def _fidelity() -> dict[str, str]:
    forty, rows = _stored("forty")["muri"], _stored("fidelity")["rows"]
    found = {"forty_runs": str(forty["live_runs"]), "fidelity_workloads": str(len(rows))}
    for metric in ("average_jct_s", "makespan_s"):
        errors = [abs(row[f"{metric}_error"]) for row in rows]
        found[f"forty_{metric}"] = _percent(forty[f"{metric}_error"], "+.1")
        found[f"fidelity_{metric}"] = (
            f"{_percent(fmean(errors), '.1')} in the mean and {_percent(max(errors), '.1')} at worst"
        )
    return found
