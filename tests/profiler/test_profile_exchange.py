"""Export files: what is written can be read, and every error says where it is."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_builders import make_profile, profiles

from muri.profiler.errors import ExchangeError
from muri.profiler.exchange import from_json, to_dict, to_json
from muri.profiler.records import ProfileDetail


@given(st.lists(profiles, max_size=5, unique_by=lambda profile: profile.key))
def test_round_trip(exported):
    assert from_json(to_json(exported), "x.json") == tuple(exported)


def test_details_are_read_under_the_names_of_0_2():
    (read,) = from_json(document(detail={"gpu_utilisation": 0.25}), "x.json")[1:]
    assert read.detail == ProfileDetail.from_dict({"gpu_utilisation": 0.25}) == ProfileDetail(gpu_utilization=0.25)


def document(**changes):
    record = to_dict(make_profile()) | changes
    return json.dumps({"schema": "muri-profiles", "version": 1, "profiles": [to_dict(make_profile("a")), record]})


def test_optional_fields_alone_may_be_missing():
    record = to_dict(make_profile())
    for field in ("gpu_mem_gib", "iterations", "measured_at", "source"):
        del record[field]
    whole = {"schema": "muri-profiles", "version": 1, "profiles": [record]}
    (read,) = from_json(json.dumps(whole), "x.json")
    assert (read.gpu_mem_gib, read.iterations, read.measured_at, read.source) == (0, 0, "", "import")
    del record["propagate_s"]
    with pytest.raises(ExchangeError, match=r"profiles\[0\].propagate_s: missing"):
        from_json(json.dumps(whole), "x.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_s": "fast"}, r"profiles\[1\]: .*load time is 'fast'; it must be a number"),
        ({"load_s": 10**400}, r"profiles\[1\]: .*load time has over 15 digits; it must be ≤ 86400 s"),
        ({"load_s": float("nan")}, r"profiles\[1\]: .*load time is nan"),
        ({"iteration_s": 0}, r"profiles\[1\]: .*iteration time is 0; it must be > 0"),
        ({"batch_size": 1.5}, r"profiles\[1\]: .*batch size is 1.5; it must be a whole number"),
        ({"gpu_count": 0}, r"profiles\[1\]: .*number of GPUs is 0; it must be > 0"),
        ({"model": ""}, r"profiles\[1\].model: must not be empty"),
        ({"model": "a\x1b[31m"}, r"profiles\[1\].model: must be text without control characters"),
        ({"measured_at": "yesterday"}, r"profiles\[1\].measured_at: must be a time such as"),
        ({"lod_s": 1}, r"profiles\[1\].lod_s: unknown field; did you mean 'load_s'\?"),
        ({"model": "a"}, r"profiles\[1\] repeats profiles\[0\]"),
        ({"detail": []}, r"profiles\[1\].detail: must be an object with some of the fields stage_p95_s, "),
        ({"detail": {"confidense": 1}}, r"profiles\[1\].detail.confidense: unknown field; did you mean 'confidence'\?"),
        ({"detail": {"busy_s": [1, 2, "x", 4]}}, r"profiles\[1\].detail: busy_s is 'x'; it must be a number"),
        ({"detail": {"dangers": "compile"}}, r"profiles\[1\].detail: dangers must be a list, found 'compile'"),
        ({"detail": {"busy_s": [1]}}, r"profiles\[1\].detail: busy_s: there must be one figure per stage"),
        ({"detail": {"confidence": None}}, r"profiles\[1\].detail.confidence: is null; leave out what was not"),
        ({"detail": {"confidence": 2}}, r"profiles\[1\].detail: confidence is 2; it must be between 0 and 1"),
        (
            {"detail": {"warmup_iterations": 1.5}},
            r"profiles\[1\].detail: warmup_iterations is 1.5; it must be a whole number",
        ),
    ],
)
def test_errors_name_the_place(changes, message):
    with pytest.raises(ExchangeError, match=r"x\.json: " + message):
        from_json(document(**changes), "x.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1: not JSON"),
        ('{"schema":\n oops}', "line 2, column 2: not JSON"),
        ("[" * 100_000, "levels deep"),
        ('{"schema": "other"}', "not an export of profiles"),
        ('{"schema": "muri-profiles", "version": 2}', "version is 2; this version of Muri reads 1"),
        ('{"schema": "muri-profiles", "version": 1}', '"profiles" must be a list'),
        ('{"schema": "muri-profiles", "version": 1, "profiles": [3]}', r"profiles\[0\]: must be an object"),
    ],
)
def test_files_that_are_no_export(text, message):
    with pytest.raises(ExchangeError, match=message):
        from_json(text, "x.json")
