"""YAML that others wrote, read as data; by itself because users' own Pythons may lack a library for it."""

from functools import cache
from typing import Any

from muri.foreign import require_flat, too_deep


def yaml_of(text: str, source: str = "the text") -> Any:
    """Read YAML.

    Args:
        text: The YAML.
        source: What it comes from, such as a file's name, for messages about a place in it.

    Raises:
        ValueError: It is something else, nested too deeply, or names a key of a mapping twice.
    """
    try:
        value = _loader()(text).get_single_data()
    except RecursionError as error:
        raise too_deep() from error
    except Exception as error:  # numbers and times that are none end in whatever their constructors raise
        raise ValueError(str(error).replace('"<unicode string>"', source) or type(error).__name__) from error
    require_flat(value)
    return value


@cache
def _loader() -> type[Any]:
    """PyYAML's safe loader, which takes the last of equal keys, made to refuse them."""
    import yaml  # takes time to load

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
