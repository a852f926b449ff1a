"""Muri's words in AdminComment: others' text is kept, and nothing unreadable does harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.comment_tags import SubmitRequest, parse_request

WORDS = st.lists(st.text("abc=,{}:\"'é", min_size=1, max_size=8), max_size=5)


@given(WORDS, st.text(max_size=30))
def test_tokens_come_and_go_and_leave_other_words_alone(words, value):
    comment = " ".join(words)
    text = tags.format_json({"value": value})
    assert " " not in text
    tagged = tags.with_token(comment, tags.STATE_PREFIX, text)
    assert tags.parse_json(tags.token(tagged, tags.STATE_PREFIX)) == {"value": value}
    assert tags.with_token(tagged, tags.STATE_PREFIX, None) == " ".join(comment.split())


def test_a_members_promise_survives_the_round_trip_and_older_comments_have_none():
    state = tags.MemberState(7, tags.Original("gres/gpu:1", "n[1-2]", 4, 4, 2000, 3600), 2, 7200, min_speed=0.8)
    text = tags.format_state(state)
    assert tags.parse_state(f"muri-state:{text}") == state
    assert tags.parse_state("muri-state:" + text.replace(',"min_speed":0.8', "")).min_speed == 0
    for damaged in ('"x"', "1", "-0.1", "true"):
        assert tags.parse_state("muri-state:" + text.replace('"min_speed":0.8', f'"min_speed":{damaged}')) is None


def test_a_task_keeps_its_place_only_by_a_whole_tag():
    place = tags.Place(0, 7, "after:1")
    text = tags.format_record(place)
    assert tags.parse_place(f"muri-place:{text}") == place
    for part in ('"dependency":"after:1",', ',"own_nice":0'):
        assert part in text
        assert tags.parse_place("muri-place:" + text.replace(part, "")) is None


def test_what_was_planned_survives_the_round_trip():
    planned = tags.Planned(("jobs 1 and 2: γ = 0.9", '"quoted"'), 0.9, 0.25, estimated=True)
    comment = tags.with_plan("others' muri:on", planned)
    assert tags.parse_plan(comment) == planned
    assert tags.parse_plan(tags.with_plan(comment, tags.Planned(("alone",)))) == tags.Planned(("alone",))
    assert tags.with_plan(comment, None) == "others' muri:on"
    odd = tags.parse_plan(tags.with_plan("", tags.Planned(("caf\udce9\n",))))
    assert odd.why == (r"caf\udce9\n",)
    many = tags.with_plan("", tags.Planned(("a b " * 500,) * 9, 0.9, 0.25))
    assert len(many) < 2100
    assert tags.parse_plan(many).speed == 0.9
    assert tags.parse_plan(many).why


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"speed":"x"}', '{"speed":-1}', '{"why":1}', '{"pilot":1,"original":{"x":1}}']
)
def test_a_damaged_plan_or_state_is_none(text):
    assert tags.parse_state(f"muri-state:{text}") is None
    assert tags.parse_state("muri-state:{}") is None
    assert tags.parse_given(f"muri-given:{text}") is None
    assert "pilot" in text or tags.parse_plan(f"muri-plan:{text}") is None


def test_what_is_no_job_id_is_no_member():
    assert tags.parse_pilot(f"muri-pilot:a:²,{'9' * 5000},7") == ("a", (7,))


def test_a_full_request_is_read():
    keys = "model=a/b,batch-size=8,duration=90,checkpoint=1,alone=1,min-speed=0.75,opportunistic=1"
    request = parse_request(f"billing=7 muri:{keys} x")
    assert request == SubmitRequest("a/b", 8, 90, checkpoint=True, alone=True, min_speed=0.75, opportunistic=True)
    assert parse_request("billing=7 nomuri:on") is None


@pytest.mark.parametrize(
    "text",
    [
        "muri:on",
        "muri:batch-size=0",
        "muri:batch-size=-4,duration=x",
        "muri:batch-size=1000000001,duration=315360001,accumulate=1025",
        "muri:min-speed=1",
        "muri:min-speed=0.80",
        "muri:min-speed=nan",
        "muri:model=-a,checkpoint=yes,alone=0,unknown=1",
        "muri:model=" + "x" * 65,
        "muri:batch-size=" + "9" * 5000,
        "muri:batch-size=٣,duration=²",
        "muri:,=,==,model",
    ],
)
def test_what_cannot_be_read_counts_as_not_given(text):
    assert parse_request(text) == SubmitRequest()
