"""YAML that others wrote, read as data; by itself because users' own Pythons may lack a library for it."""

from typing import Any

from muri.foreign import require_flat, too_deep


def yaml_of(text: str) -> Any:
    """Read YAML.

    Raises:
        ValueError: It is something else, or nested too deeply.
    """
    import yaml  # takes time to load

    try:
        value = yaml.safe_load(text)  # noqa: TID251
    except RecursionError as error:
        raise too_deep() from error
    except Exception as error:  # numbers and times that are none end in whatever their constructors raise
        raise ValueError(str(error) or type(error).__name__) from error
    require_flat(value)
    return value
