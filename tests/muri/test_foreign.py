"""Text of others is data or a ValueError, never another error; nesting that no code could walk through is refused."""

import json

import pytest

from muri.foreign import MOST_LEVELS, json_of
from muri.foreign_yaml import yaml_of
from muri.slurm_plugin.config import ConfigError, load_config

DEEP = ("[" * 5_000, "[" * MOST_LEVELS + "[]" + "]" * MOST_LEVELS, '{"a":' * 500 + "1" + "}" * 500)


@pytest.mark.parametrize("read", [json_of, yaml_of])
def test_nesting_is_read_as_deep_as_code_can_walk_through_it(read) -> None:
    for text in DEEP:
        with pytest.raises(ValueError, match=f"more than {MOST_LEVELS} levels"):
            read(text)
    assert json.dumps(read("[" * MOST_LEVELS + "]" * MOST_LEVELS), indent=1)
    assert read("7") == 7


ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 50))


def test_what_yaml_can_hold_and_muri_cannot_use_is_one_kind_of_error() -> None:
    for text in ("a: &x [*x]", "!!int ''", "!!timestamp x", "a: " + "9" * 5000, "2001-13-45", "{a: [1", "[1]: 3", "\0"):
        with pytest.raises(ValueError, match=r"\w"):
            yaml_of(text)
    assert set(yaml_of(ALIASES)) == {f"a{i}" for i in range(50)}, "aliases are read without being written out"


@pytest.mark.parametrize("text", [DEEP[0], "1: 2", "a: !!float ''"], ids=["deep", "number", "float"])
def test_a_damaged_configuration_is_refused_as_one(tmp_path, text) -> None:
    path = tmp_path / "muri.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(path)
