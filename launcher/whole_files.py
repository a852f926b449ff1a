"""JSON files that others read while they are written again and again."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def write_whole(path: Path, document: Mapping[str, object]) -> None:
    """Write a file so that a reader sees all of it or none."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document) + "\n", encoding="utf-8")
    temporary.replace(path)
