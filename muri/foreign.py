"""JSON and YAML that others wrote, read as data: whatever is wrong with it is a ValueError, as callers expect.

Ruff forbids the library's own functions elsewhere (pyproject.toml).
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, Final

MOST_LEVELS: Final = 100
"""Muri writes nothing deeper; code that walks through it would end at Python's limit of recursion."""


def json_of(text: str | bytes) -> Any:
    """Read JSON; raises a ValueError for anything else, and for text that is nested too deeply."""
    try:
        value = json.loads(text)  # noqa: TID251
    except RecursionError as error:
        raise too_deep() from error
    require_flat(value)
    return value


def too_deep() -> ValueError:
    """The error for text that is nested too deeply."""
    return ValueError(f"it is nested more than {MOST_LEVELS} levels deep")


def require_flat(value: Any) -> None:
    """Raise a ValueError for data that is nested too deeply."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_LEVELS):
        every = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        # By identity: what YAML's aliases name again and again is looked at once in each level.
        level = list({id(part): part for part in every if isinstance(part, (dict, list))}.values())
    if level:
        raise too_deep()


def yaml_of(text: str, source: str = "the text") -> Any:
    """Read YAML.

    Args:
        text: The YAML.
        source: Its origin, such as a file's name, for messages about a place in it.
    """
    try:
        value = _loader()(text).get_single_data()
    except RecursionError as error:
        raise too_deep() from error
    except Exception as error:  # invalid numbers and times end in any error of their constructors
        raise ValueError(str(error).replace('"<unicode string>"', source) or type(error).__name__) from error
    require_flat(value)
    return value


@lru_cache(maxsize=None)
def _loader() -> type[Any]:
    """PyYAML's safe loader, which takes the last of equal keys, made to refuse them."""
    import yaml  # takes time to load, and users' own Pythons may lack it

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> Any:
            mapping = super().compose_mapping_node(anchor)
            found: dict[tuple[str, str], Any] = {}
            for key, _ in mapping.value:
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                first = found.setdefault((key.tag, key.value), key)
                if first is not key:
                    lines = f"line {first.start_mark.line + 1} and again in line {key.start_mark.line + 1}"
                    raise ValueError(f"the key {key.value} stands in {lines}: leave one of them")
            return mapping

    return Loader
