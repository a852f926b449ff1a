"""What `profile_zoo.py` measured of the zoo and `predictor.py` kept."""

import json
from pathlib import Path
from typing import Any, Final

from muri.profiler.exchange import from_json
from muri.profiler.records import StageProfile
from muri_lab.prediction.features import Example, GraphFeatures

ZOO: Final = Path(__file__).parent / "results" / "zoo.json"


def saved_zoo() -> tuple[Example, ...]:
    """Features and measured profile of each configuration."""
    entries = json.loads(ZOO.read_text(encoding="utf-8"))["entries"]
    return tuple(Example(GraphFeatures.from_dict(item["features"]), _profile(item["profile"])) for item in entries)


def _profile(values: dict[str, Any]) -> StageProfile:
    document = json.dumps({"schema": "muri-profiles", "version": 1, "profiles": [values]})
    return from_json(document, str(ZOO))[0]
