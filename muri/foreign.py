"""JSON that others wrote, read as data: whatever is wrong with it is a ValueError, as callers expect.

Ruff forbids the library's own functions elsewhere (pyproject.toml).
"""

from __future__ import annotations

import json
from typing import Any, Final

MOST_LEVELS: Final = 100
"""Deeper nesting is nothing of Muri's; code that walks through it would end at Python's limit of recursion."""


def json_of(text: str | bytes) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is something else, or nested too deeply.
    """
    try:
        value = json.loads(text)  # noqa: TID251
    except RecursionError as error:
        raise too_deep() from error
    require_flat(value)
    return value


def too_deep() -> ValueError:
    """What is raised for text that is nested too deeply."""
    return ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def require_flat(value: Any) -> None:
    """Refuse what is nested too deeply.

    Raises:
        ValueError: It is.
    """
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        every = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        # By identity: what YAML's aliases name again and again is looked at once in each level.
        level = list({id(part): part for part in every if isinstance(part, (dict, list))}.values())
    if level:
        raise too_deep()
