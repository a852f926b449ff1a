"""Lists, bars and comparisons of profiles."""

import json
from dataclasses import replace

import pytest
from profile_builders import make_profile
from profile_commands import invoke

from muri.profiler.records import ProfileDetail
from muri.profiler.store import Author, ProfileStore

DETAIL = ProfileDetail(
    stage_p95_s=(0.14, 0.06, 0.31, 0.002), stage_cv=(0.1, 0.1, 0.01, 0.3), busy_s=(0.24, 0.05, 0.3, 0.05),
    iteration_p95_s=0.5, iteration_cv=0.02, host_mem_gib=2.1, cpu_cores=2.3, gpu_utilization=0.63, gradient_mib=44.6,
    confidence=0.93, warmup_iterations=10, dangers=("children", "compile"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def path(path):
    slow = make_profile("vgg16", gpu_count=2, iteration_s=0.9, load_s=0.6, gpu_mem_gib=8.0)
    with ProfileStore(path) as store:
        store.put_all(
            (
                make_profile("resnet18", detail=DETAIL),
                make_profile("resnet50", gpu_type="a100", gpu_mem_gib=5.0, measured_at="2026-05-01T12:00:00Z"),
                slow,
                make_profile("gpt2", source="predicted", iteration_s=0.5),
            )
        )
        store.mark_stale(slow.key, "load takes twice as long", Author("ann", "2026-03-02T12:00:00Z", "stale"))
    return path


def output_of(*arguments):
    output = invoke(*arguments).output
    assert max(len(line) for line in output.splitlines()) <= 80
    return output


def listed(*arguments):
    return [item["model"] for item in json.loads(invoke("list", "--json", *arguments).output)["profiles"]]


def stale_mark(*arguments):
    return json.loads(invoke("show", *arguments, "--json").output)["stale"]


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("model", "gpt2", "vgg16"),
        ("age", "resnet50", None),
        ("iteration", "vgg16", None),
        ("bottleneck", None, "vgg16"),  # storage, after three whose bottleneck is the GPU
        ("gpu-mem", "vgg16", None),
        ("host-mem", "resnet18", None),
        ("gpus", "vgg16", None),
        ("confidence", None, "resnet18"),
    ],
)
def test_orders(sort, first, last):
    found = listed("--sort", sort)
    assert first in (None, found[0])
    assert last in (None, found[-1])
    assert sorted(found) == ["gpt2", "resnet18", "resnet50", "vgg16"]


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        (("--model", "resnet*"), ["resnet18", "resnet50"]),
        (("--model", "vgg16"), ["vgg16"]),
        (("--gpu-type", "a100"), ["resnet50"]),
        (("--user", "alice"), []),
    ],
)
def test_filters(arguments, models):
    assert listed(*arguments) == models


def test_a_list_marks_estimates_and_stale_profiles():
    output = output_of("list")
    assert "gpt2~" in output
    assert "vgg16!" in output
    assert "~ estimated, not measured" in output
    assert "! stale: to be measured again" in output
    assert "by ann: load takes twice as long" in " ".join(output.split())
    assert "~" not in output_of("list", "--model", "resnet*")
    assert output_of("list", "--user", "alice") == "None of the 4 profiles matches.\n"


def test_show_has_all_that_was_measured():
    output = output_of("show", "resnet18")
    lines = {line.split()[1]: line for line in output.splitlines() if len(line.split()) > 1}
    assert lines["load"].count("░") == 7  # 120 of 480 ms hidden, on a bar of 28
    assert lines["load"].split()[-4:] == ["120", "240", "140", "0.10"]
    assert lines["propagate"].split()[-3:] == ["300", "310", "0.01"]  # never hidden
    for expected in ("2.1 GiB", "63%", "2.3 cores", "44.6 MiB", "0.93", "20 iterations after 10 of warm-up"):
        assert expected in output


def test_show_says_what_is_stale_and_what_is_estimated():
    assert "STALE since 2026-03-02T12:00:00Z: load takes twice as long (ann)" in output_of("show", "vgg16")
    assert "(estimated, not measured)" in output_of("show", "gpt2")
    assert stale_mark("vgg16")["since"] == "2026-03-02T12:00:00Z"


def test_a_published_profile_says_whose_jobs_doubt_it(path):
    with ProfileStore(path) as store:
        published = next(item for item in store.list() if item.key.model == "resnet18")
        alices = replace(published.key, user="alice")
        store.mark_stale(alices, "load took 3 times as long", Author("drift", "2026-03-02T12:00:00Z", "stale"))
        assert "! resnet18 of alice" in output_of("list")
        assert "(drift)" in output_of("show", "resnet18")
    assert stale_mark("resnet18", "--user", "all")["who"] == "drift"
    with ProfileStore(path) as store:
        store.put(replace(published, key=alices))  # alice's jobs have been measured again
    assert stale_mark("resnet18", "--user", "all") is stale_mark("resnet18", "--user", "alice") is None
