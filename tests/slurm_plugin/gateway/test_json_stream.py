"""A document of JSON read item by item says the same as one read at once."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muri.slurm_plugin.gateway.json_stream import items
from muri.slurm_plugin.gateway.text_fields import kept_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def read(document: bytes) -> tuple[list[Any], dict[str, Any]]:
    others: dict[str, Any] = {}
    return list(items(document, "jobs", others)), others


@settings(max_examples=40)
@given(st.dictionaries(st.text(), VALUES), st.lists(VALUES), st.booleans(), st.sampled_from([None, 2]))
def test_documents_of_any_form(others: dict[str, Any], jobs: list[Any], ascii_only: bool, indent: int | None) -> None:
    document = {**others, "jobs": jobs, "errors": []}
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    assert read(text.encode("utf-8", "surrogatepass")) == (jobs, {**others, "jobs": [], "errors": []})


def test_bytes_of_any_encoding_are_kept() -> None:
    found, _ = read(b'{"jobs": ["\xf0\x9f\x98\x80 \xc3\xa9 \xe9 \\u00e9 \\ud83d\\ude00 \t", "\\"]}"]}')
    assert found == ["😀 é \udce9 é 😀 \t", '"]}']


def test_a_member_that_is_no_list_is_no_empty_list() -> None:
    assert read(b'{"jobs": {"a": 1}}') == ([], {"jobs": {"a": 1}})
    assert read(b" {} ") == ([], {})


NO_DOCUMENTS = ["", "{", "[]", '{"a"}', '{"a": }', "{1: 2}", "{[]: 2}", '{"a": 1,}', '{"jobs": [1 2]}', "{} x"]


@pytest.mark.parametrize("text", NO_DOCUMENTS)
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read(text.encode())


def test_long_texts_are_told_apart_without_being_kept() -> None:
    first, second = kept_text("😀" + "x" * 10**6), kept_text("😀" + "y" * 10**6)
    assert first != second
    assert len(first) < 120
    assert kept_text("x" * 16384) == "x" * 16384
    assert kept_text("\ud800\udce9" * 10**4).startswith("20000 characters")
