"""Which profile a person means."""

import pytest

from muri.profiler.errors import NoSuchProfileError
from muri.profiler.lookup import Wanted, find_one
from muri.profiler.records import ProfileKey
from muri_lab.selectors import key_for, selector

PATH = "ann:/runs:sbatch train.sh"
KEYS = (
    ProfileKey("resnet18", 64, 1, "gpu"),
    ProfileKey("resnet18", 64, 2, "gpu"),
    ProfileKey("resnet18", 128, 2, "a100"),
    ProfileKey("gpt2", 4, 1, "a100"),
    ProfileKey(PATH, 0, 1, "gpu"),
)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("gpt2", 3),
        ("resnet18:64:1", 0),
        ("resnet18:64:2:gpu", 1),
        ("resnet18:128", 2),
        ("resnet18:::a100", 2),
        (PATH, 4),
        (f"{PATH}:0:1", 4),
    ],
)
def test_a_selector_names_one_profile(text, index):
    assert find_one(KEYS, selector(KEYS, text)) == KEYS[index]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("resnet18", "3 profiles are of 'resnet18'"),
        ("resnet18:32", "no such profile of 'resnet18'. There are:"),
        ("resnet19", "did you mean resnet18?"),
        ("gpt2:four", r"'gpt2:four' is not MODEL\[:BATCH\[:GPUS\[:TYPE\[:USER\]\]\]\], such as resnet18:64:2:a100"),
        ("gpt2:4:1:a100:x", "no such profile of 'gpt2'"),
        ("gpt2:4:1:a100:x:y", "is not MODEL"),
    ],
)
def test_a_selector_that_names_none_or_several(text, said):
    with pytest.raises(NoSuchProfileError, match=said):
        find_one(KEYS, selector(KEYS, text))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted("gpt2", gpu_count=8), ProfileKey("gpt2", 4, 8, "a100")),
        (Wanted("gpt2", batch_size=32), ProfileKey("gpt2", 32, 1, "a100")),
        (Wanted("resnet18", gpu_type="a100"), ProfileKey("resnet18", 128, 1, "a100")),
        (Wanted("new"), ProfileKey("new", 0, 1, "gpu")),
        (Wanted("new", 8, 2, "h100"), ProfileKey("new", 8, 2, "h100")),
    ],
)
def test_what_was_not_said_comes_from_the_models_profiles(wanted, expected):
    assert key_for(KEYS, wanted) == expected


def test_what_the_models_profiles_differ_in_must_be_said():
    with pytest.raises(NoSuchProfileError, match="several batch sizes or GPU types"):
        key_for(KEYS, Wanted("resnet18", gpu_count=4))
