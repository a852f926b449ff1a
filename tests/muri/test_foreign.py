"""Text of others is data or a ValueError, never another error; nesting that no code could walk through is refused."""

import json

import pytest

from muri.text import MOST_LEVELS, json_of, yaml_of

DEEP = ("[" * 5_000, "[" * MOST_LEVELS + "[]" + "]" * MOST_LEVELS, '{"a":' * 500 + "1" + "}" * 500)
NO_YAML = ("a: &x [*x]", "!!int ''", "!!timestamp x", "a: " + "9" * 5000, "2001-13-45", "{a: [1", "[1]: 3", "\0")
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 50))


def test_what_cannot_be_used_is_one_kind_of_error() -> None:
    for read, text in [(read, text) for read in (json_of, yaml_of) for text in DEEP] + [(yaml_of, t) for t in NO_YAML]:
        with pytest.raises(ValueError, match="levels" if text in DEEP else r"\w"):
            read(text)
    assert all(json.dumps(read("[" * MOST_LEVELS + "]" * MOST_LEVELS), indent=1) for read in (json_of, yaml_of))
    assert len(yaml_of(ALIASES)) == 50, "aliases are read without being written out"


@pytest.mark.parametrize(
    ("text", "lines"),
    [("a: 1\nb: 2\na: 3", (1, 3)), ("x:\n- {a: 1,\n   'a': 2}", (2, 3)), ("x:\n  1: 2\n  1: 2", (2, 3))],
)
def test_a_key_that_stands_twice_is_an_error_with_both_lines(text, lines) -> None:
    with pytest.raises(ValueError, match=f"in line {lines[0]} and again in line {lines[1]}"):
        yaml_of(text)


def test_keys_of_other_mappings_may_be_the_same_and_merged_ones_replaced() -> None:
    assert yaml_of("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n")["b"] == {"x": 3, "y": 2}
    assert yaml_of("- {1: 2}\n- {'1': 2, 1: 3}")[1] == {"1": 2, 1: 3}


def test_a_place_in_the_text_is_told_by_the_name_of_its_source() -> None:
    with pytest.raises(ValueError, match=r"in /etc/muri/muri\.yaml, line 2"):
        yaml_of("a: 1\nb: [", "/etc/muri/muri.yaml")
