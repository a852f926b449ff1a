"""The request in a job's tag: every key is read, and what cannot be read counts as not given."""

import pytest

from muri.slurm_plugin.records.submit_option import SubmitRequest, parse_request


def test_a_full_request_is_read():
    keys = "model=a/b,batch-size=8,duration=90,checkpoint=1,alone=1,min-speed=0.75,opportunistic=1"
    request = parse_request(f"billing=7 muri:{keys} x")
    assert request == SubmitRequest("a/b", 8, 90, checkpoint=True, alone=True, min_speed=0.75, opportunistic=True)


def test_a_job_without_a_tag_is_none_of_our_business():
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
