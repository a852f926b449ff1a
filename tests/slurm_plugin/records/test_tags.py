"""Muri's words in AdminComment: others' text is kept, and nothing unreadable does harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.records import comment_tags as tags

WORDS = st.lists(st.text("abc=,{}:\"'é", min_size=1, max_size=8), max_size=5)


@given(WORDS, st.text(max_size=30))
def test_tokens_come_and_go_and_leave_other_words_alone(words, value):
    comment = " ".join(words)
    text = tags.format_json({"value": value})
    assert " " not in text
    tagged = tags.with_token(comment, tags.STATE_PREFIX, text)
    assert tags.parse_json(tags.token(tagged, tags.STATE_PREFIX)) == {"value": value}
    assert tags.with_token(tagged, tags.STATE_PREFIX, None) == " ".join(comment.split())


def test_a_members_state_survives_the_round_trip():
    state = tags.MemberState(7, tags.Original("gres/gpu:1", "n[1-2]", 4, 4, 2000, 3600))
    comment = tags.with_token("muri:on", tags.STATE_PREFIX, tags.format_state(state))
    assert tags.parse_state(comment) == state


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{", '{"host":1,"original":{"x":1}}'])
def test_a_damaged_state_is_no_state(text):
    assert tags.parse_state(f"muri-state:{text}") is None


def test_a_pilots_token_names_its_members():
    assert tags.parse_pilot("x muri-host:" + tags.format_pilot("t1", (3, 4))) == ("t1", (3, 4))
