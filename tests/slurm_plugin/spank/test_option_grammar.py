"""The keys of `--muri` in Lua, Python, the help of sbatch and the documentation page: they agree."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lupa.lua51 import LuaRuntime
from option_sources import JOB_SUBMIT_SOURCE, REPOSITORY, SPANK_SOURCE, Outcome

from muri.slurm_plugin.records.comment_tags import SubmitRequest, parse_request

Options = Callable[..., Outcome]

PAGE = REPOSITORY / "docs" / "sbatch-option.md"
MODULE = LuaRuntime().execute((JOB_SUBMIT_SOURCE / "muri.lua").read_text(encoding="utf-8"))
KEYS: list[dict[str, Any]] = [dict(key.items()) for key in MODULE.KEYS.values()]


def as_field(key: dict[str, Any], value: str | int) -> str | int | float:
    """A value of the tag as Python reads it."""
    kind: dict[str, type[str] | type[float]] = {"name": str, "share": float}
    return kind.get(key["type"], int)(value)


def attribute(key: dict[str, Any]) -> str:
    return key["name"].replace("-", "_") + ("_s" if key["type"] == "time" else "")


def valid_values(key: dict[str, Any]) -> st.SearchStrategy[str | int]:
    """Values as the tag holds them."""
    if key["type"] == "name":
        return st.from_regex(rf"[A-Za-z0-9][A-Za-z0-9._+/-]{{0,{key['max'] - 1}}}", fullmatch=True)
    if key["type"] == "share":
        return st.integers(0, 999).map(lambda thousandths: f"{thousandths / 1000:g}")
    if key["type"] == "flag":
        return st.just(1)
    return st.integers(key["min"], key["max"]) | st.sampled_from([key["min"], key["max"]])


def doubtful_values(key: dict[str, Any]) -> st.SearchStrategy[str]:
    """Values of which many are just beyond what the key allows."""
    if key["type"] == "name":
        longest = key["max"]
        return st.integers(longest - 1, longest + 1).map("x".__mul__) | st.text("aZ0._+/-=: é", max_size=4)
    if key["type"] == "share":
        return st.text("0189.-+e٣", max_size=6) | st.sampled_from(["1", "0.", ".5", "0.9999", "0.500", "00.5", "nan"])
    least, most = key.get("min", 1), key.get("max", 1)
    numbers = st.sampled_from([least - 1, least, most, most + 1, 10 * most, 10**18, 10**40]).map(str)
    return numbers | st.text("0123456789-+.ehxy", max_size=4) | st.sampled_from(["1", "yes", "no", "on", "٣"])


VALID_REQUESTS = st.fixed_dictionaries({}, optional={key["name"]: valid_values(key) for key in KEYS})
DOUBTFUL_ITEMS = st.one_of(
    [
        *(doubtful_values(key).map(f"{key['name']}={{}}".format) for key in KEYS),
        *(valid_values(key).map(f"{key['name']}={{}}".format) for key in KEYS),
        st.sampled_from(["", "on", "=", *(key["name"] for key in KEYS)]),
        st.text("abelmnotu-=1", max_size=8),
    ]
)


def as_typed(tag: str) -> str:
    """A tag's text as a user may type it: a plain number would be minutes, not seconds."""
    times = "|".join(key["name"] for key in KEYS if key["type"] == "time")
    return re.sub(rf"(?:^|(?<=,))((?:{times})=\d+)(?=,|$)", r"\1s", tag)


@settings(max_examples=50)
@given(request=VALID_REQUESTS, data=st.data())
def test_a_valid_request_is_the_same_in_all_languages(
    options: Options, request: dict[str, str | int], data: st.DataObject
) -> None:
    tag = ",".join(f"{key['name']}={request[key['name']]}" for key in KEYS if key["name"] in request) or "on"
    items = data.draw(st.permutations(tag.split(",")))
    assert options(f"cli:--muri={as_typed(','.join(items))}") == Outcome(tag, "")
    assert MODULE.is_canonical(tag)
    given_fields = {attribute(key): as_field(key, request[key["name"]]) for key in KEYS if key["name"] in request}
    assert parse_request(f"muri:{tag}") == SubmitRequest(**given_fields)


@settings(max_examples=60)
@given(items=st.lists(DOUBTFUL_ITEMS, min_size=1, max_size=4))
def test_an_older_plugins_mark_passes_exactly_if_an_option_becomes_it(options: Options, items: list[str]) -> None:
    text = ",".join(items)
    outcome = options(f"cli:--muri={as_typed(text)}")
    assert MODULE.is_canonical(text) == (outcome.mark == text)
    assert outcome.error.strip() if outcome.mark is None else MODULE.is_canonical(outcome.mark)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key["name"])
@given(data=st.data())
def test_python_takes_from_a_tag_exactly_what_lua_lets_pass(key: dict[str, Any], data: st.DataObject) -> None:
    value = data.draw(doubtful_values(key).map(lambda text: re.sub(r"\s", "", text)))
    item = f"{key['name']}={value}"
    expected = SubmitRequest()
    if MODULE.is_canonical(item):
        expected = SubmitRequest(**{attribute(key): as_field(key, value)})
    assert parse_request(f"muri:{item}") == expected


@pytest.mark.parametrize("key", [key for key in KEYS if "example" in key], ids=lambda key: key["name"])
def test_the_examples_of_the_table_are_valid(options: Options, key: dict[str, Any]) -> None:
    assert options(f"cli:--muri={key['example']}").error == ""


def test_python_the_help_of_sbatch_and_the_page_know_the_same_keys() -> None:
    assert [attribute(key) for key in KEYS] == list(SubmitRequest.__dataclass_fields__)
    help_text = re.sub(r'"\s+"', "", (SPANK_SOURCE / "spank.c").read_text(encoding="utf-8"))
    assert f"Keys: {', '.join('{form} ({help})'.format(**key) for key in KEYS)}. sbatch" in help_text
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ", page.partition("## Keys")[2].partition("\n## ")[0], re.MULTILINE)
    assert [form for form, _ in rows] == [key["form"] for key in KEYS]
    for key, (_, description) in zip(KEYS, rows, strict=True):
        assert key["type"] == "time" or all(str(key[limit]) in description for limit in ("min", "max") if limit in key)
    assert all("muri:   {form:14} {help}\n".format(**key) in page for key in KEYS)
