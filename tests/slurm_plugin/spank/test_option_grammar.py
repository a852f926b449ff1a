"""One table of keys for C, Lua, Python and the documentation page: they agree, and a difference is found."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from lupa.lua51 import LuaRuntime
from option_sources import JOB_SUBMIT_SOURCE, REPOSITORY, Outcome

from muri.slurm_plugin.records.submit_option import SubmitRequest, parse_request

Options = Callable[..., Outcome]
IsCanonical = Callable[[str], bool]

TABLE = REPOSITORY / "slurm_plugin" / "submit_option.yaml"
KEYS: list[dict[str, Any]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
GENERATOR = "scripts/generate_option_grammar.py"
GENERATED = [
    ("slurm_plugin/spank/keys.h", "MURI_NAME_MAX = 64", "MURI_NAME_MAX = 65"),
    ("slurm_plugin/spank/keys.c", ".max = 1024", ".max = 1025"),
    ("slurm_plugin/job_submit/muri.lua", "max = 1024 }", "max = 1025 }"),
    ("slurm_plugin/records/submit_option.py", "accumulate: int = 1", "accumulate: int = 2"),
    ("slurm_plugin/records/submit_option.py", '("accumulate", _number(1, 1024))', '("accumulate", _number(1, 1025))'),
    ("docs/sbatch-option.md", "from 1 to 1024", "from 1 to 1025"),
    ("docs/sbatch-option.md", "    muri:   model=NAME ", "    muri:   model=WORD "),
]


@pytest.fixture(scope="module")
def is_canonical() -> IsCanonical:
    return LuaRuntime().execute((JOB_SUBMIT_SOURCE / "muri.lua").read_text(encoding="utf-8")).is_canonical


def as_field(key: dict[str, Any], value: str | int) -> str | int | float:
    """A value of the tag as Python reads it."""
    kind: dict[str, type[str] | type[float]] = {"name": str, "share": float}
    return kind.get(key["type"], int)(value)


def attribute(key: dict[str, Any]) -> str:
    return key["name"].replace("-", "_") + ("_s" if key["type"] == "time" else "")


def valid_values(key: dict[str, Any]) -> st.SearchStrategy[str | int]:
    """Values as the tag holds them."""
    if key["type"] == "name":
        return st.from_regex(rf"[A-Za-z0-9][A-Za-z0-9._+/-]{{0,{key['longest'] - 1}}}", fullmatch=True)
    if key["type"] == "share":
        return st.integers(0, 999).map(lambda thousandths: f"{thousandths / 1000:g}")
    if key["type"] == "flag":
        return st.just(1)
    least, most = key.get("min", 1), key.get("max", key.get("max_s"))
    return st.integers(least, most) | st.sampled_from([least, most])


def doubtful_values(key: dict[str, Any]) -> st.SearchStrategy[str]:
    """Values of which many are just beyond what the key allows."""
    if key["type"] == "name":
        longest = key["longest"]
        return st.integers(longest - 1, longest + 1).map("x".__mul__) | st.text("aZ0._+/-=: é", max_size=4)
    if key["type"] == "share":
        return st.text("0189.-+e٣", max_size=6) | st.sampled_from(["1", "0.", ".5", "0.9999", "0.500", "00.5", "nan"])
    least, most = key.get("min", 1), key.get("max", key.get("max_s", 1))
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
    options: Options, is_canonical: IsCanonical, request: dict[str, str | int], data: st.DataObject
) -> None:
    tag = ",".join(f"{key['name']}={request[key['name']]}" for key in KEYS if key["name"] in request) or "on"
    items = data.draw(st.permutations(tag.split(",")))
    assert options(f"cli:--muri={as_typed(','.join(items))}") == Outcome(tag, "")
    assert is_canonical(tag)
    given_fields = {attribute(key): as_field(key, request[key["name"]]) for key in KEYS if key["name"] in request}
    assert parse_request(f"muri:{tag}") == SubmitRequest(**given_fields)


@settings(max_examples=60)
@given(items=st.lists(DOUBTFUL_ITEMS, min_size=1, max_size=4))
def test_lua_lets_pass_exactly_what_c_can_write(options: Options, is_canonical: IsCanonical, items: list[str]) -> None:
    text = ",".join(items)
    outcome = options(f"cli:--muri={as_typed(text)}")
    assert is_canonical(text) == (outcome.mark == text)
    assert outcome.error.strip() if outcome.mark is None else is_canonical(outcome.mark)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key["name"])
@given(data=st.data())
def test_python_takes_from_a_tag_exactly_what_lua_lets_pass(
    is_canonical: IsCanonical, key: dict[str, Any], data: st.DataObject
) -> None:
    value = data.draw(doubtful_values(key).map(lambda text: re.sub(r"\s", "", text)))
    item = f"{key['name']}={value}"
    expected = SubmitRequest()
    if is_canonical(item):
        expected = SubmitRequest(**{attribute(key): as_field(key, value)})
    assert parse_request(f"muri:{item}") == expected


@pytest.mark.parametrize("key", [key for key in KEYS if "example" in key], ids=lambda key: key["name"])
def test_the_examples_of_the_table_are_valid(options: Options, key: dict[str, Any]) -> None:
    assert options(f"cli:--muri={key['name']}={key['example']}").error == ""


def generate(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, checkout / GENERATOR, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_everything_follows_the_table_and_an_edit_of_an_output_is_shown_and_can_be_undone(tmp_path: Path) -> None:
    checkout = tmp_path
    for name in {GENERATOR, str(TABLE.relative_to(REPOSITORY)), *(name for name, _, _ in GENERATED)}:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    done = generate(checkout, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    before = {name: (checkout / name).read_text(encoding="utf-8") for name, _, _ in GENERATED}
    for name, generated, edited in GENERATED:
        text = (checkout / name).read_text(encoding="utf-8")
        assert generated in text
        (checkout / name).write_text(text.replace(generated, edited), encoding="utf-8")
    done = generate(checkout, "--check")
    assert done.returncode == 1
    assert all(name in done.stdout and edited in done.stdout for name, _, edited in GENERATED)
    assert f"run `.venv/bin/python {GENERATOR}`" in done.stderr
    assert generate(checkout).returncode == 0
    assert {name: (checkout / name).read_text(encoding="utf-8") for name in before} == before
