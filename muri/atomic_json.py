"""JSON files that one process replaces while others read them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Write a file so that a reader sees all of it or none: under another name, then renamed."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(document) + "\n", encoding="utf-8")
    draft.replace(path)
