"""The option parser of the SPANK plugin: --muri and --no-muri in three layers."""

import re
import string
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from option_sources import Outcome

Options = Callable[..., Outcome]
NUMBER = r"(batch-size|duration|accumulate)=[1-9]\d*"
SHARE = r"min-speed=0(\.[0-9]{0,2}[1-9])?"
ITEM = rf"(model=[A-Za-z0-9][A-Za-z0-9._+/-]{{0,63}}|{NUMBER}|checkpoint=1|alone=1|{SHARE})"
CANONICAL = re.compile(rf"on|{ITEM}(,{ITEM}){{0,6}}")
VALID_KEYS = ["model=NAME", "batch-size=N", "duration=TIME", "checkpoint:", "alone:", "accumulate=N", "min-speed=X"]


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("", "on"),
        ("=", "on"),
        ("=1", "on"),
        ("=on", "on"),
        ("=model=resnet18", "model=resnet18"),
        ("=model=facebook/opt-1.3b", "model=facebook/opt-1.3b"),
        ("=alone,model=a", "model=a,alone=1"),
        ("=alone=1,checkpoint=YES,duration=1h,batch-size=64,model=m",
         "model=m,batch-size=64,duration=3600,checkpoint=1,alone=1"),
        ("=accumulate=8,alone", "alone=1,accumulate=8"),
        ("=checkpoint=no", "on"),
        ("=alone=0,batch-size=0016", "batch-size=16"),
        ("=model=a,model=a", "model=a"),
        ("=duration=60,duration=1:00:00", "duration=3600"),
        ("=model=" + "x" * 64, "model=" + "x" * 64),
        ("=min-speed=0.8,accumulate=8", "accumulate=8,min-speed=0.8"),
        ("=min-speed=.75", "min-speed=0.75"),
        ("=min-speed=0.500,min-speed=0.5", "min-speed=0.5"),
        ("=min-speed=0.125", "min-speed=0.125"),
        ("=min-speed=0.999", "min-speed=0.999"),
        ("=min-speed=0", "min-speed=0"),
        ("=min-speed=0.000", "min-speed=0"),
        ("=min-speed=0.001", "min-speed=0.001"),
    ],
)  # fmt: skip
def test_canonical_form(options: Options, text: str, mark: str) -> None:
    assert options(f"cli:--muri{text}") == Outcome(mark, "")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1", 60), ("90", 5400), ("1:30", 90), ("01:00:00", 3600), ("2-00", 172800), ("1-02", 93600),
        ("1-02:30", 95400), ("1-02:30:05", 95405), ("0-0:0:1", 1), ("45s", 45), ("90m", 5400), ("2h", 7200),
        ("3d", 259200), ("3650d", 315360000),
    ],
)  # fmt: skip
def test_duration(options: Options, text: str, seconds: int) -> None:
    assert options(f"cli:--muri=duration={text}") == Outcome(f"duration={seconds}", "")


@pytest.mark.parametrize(
    "text",
    ["0", "0s", "00:00:00", "-5", "1:2:3:4", "1-", "-", "1-2-3", "1h30m", "1.5h", "1 h", "2w", "h", "1:",
     ":1", "3651d", "99999999999", "abc", "1-1s"],
)  # fmt: skip
def test_malformed_duration_names_the_forms(options: Options, text: str) -> None:
    outcome = options(f"cli:--muri=duration={text}")
    assert outcome.mark is None
    assert outcome.error.startswith(f"duration={text}: ")
    assert "HH:MM:SS" in outcome.error


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("modle", "model"), ("mdel", "model"), ("models", "model"), ("batch_size", "batch-size"),
        ("batchsize", "batch-size"), ("batch", "batch-size"), ("durations", "duration"),
        ("checkpiont", "checkpoint"), ("ckeckpoint", "checkpoint"), ("alon", "alone"), ("aloen", "alone"),
    ],
)  # fmt: skip
def test_unknown_key_suggests_the_nearest_and_lists_all(options: Options, typed: str, meant: str) -> None:
    outcome = options(f"cli:--muri={typed}=x")
    assert f'unknown key "{typed}"; did you mean "{meant}"?' in outcome.error
    assert all(key in outcome.error for key in VALID_KEYS)


@pytest.mark.parametrize("typed", ["gpus", "x", "nonsense", "MODEL", "q" * 100])
def test_a_far_key_gets_the_list_without_a_guess(options: Options, typed: str) -> None:
    outcome = options(f"cli:--muri={typed}=x")
    assert "unknown key" in outcome.error
    assert "did you mean" not in outcome.error
    assert all(key in outcome.error for key in VALID_KEYS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model", "model needs a value"),
        ("model=", "model= has no value"),
        ("batch-size", "batch-size needs a value"),
        ("batch-size=0", "batch-size=0: not a whole number"),
        ("batch-size=-1", "batch-size=-1: not a whole number"),
        ("batch-size=1e3", "batch-size=1e3: not a whole number"),
        ("batch-size=99999999999999999999", "not a whole number"),
        ("model=-x", "starts with a letter or digit"),
        ("model=a b", "starts with a letter or digit"),
        ("model=é", "starts with a letter or digit"),
        ("model=" + "x" * 65, "has 65 characters; at most 64"),
        ("accumulate=0", "not a whole number from 1 to 1024; for example accumulate=8"),
        ("accumulate=4,accumulate=2", "accumulate is given twice with different values (4 and 2)"),
        ("accumulate", "accumulate needs a value"),
        (
            "min-speed=2",
            "min-speed=2: not a number from 0 to 0.999 with at most three digits after the point; for "
            "example min-speed=0.8",
        ),
        ("min-speed=1", "not a number from 0 to 0.999"),
        ("min-speed=1.0", "not a number from 0 to 0.999"),
        ("min-speed=-0.5", "not a number from 0 to 0.999"),
        ("min-speed=80%", "not a number from 0 to 0.999"),
        ("min-speed=0.1234", "not a number from 0 to 0.999"),
        ("min-speed=0.", "not a number from 0 to 0.999"),
        ("min-speed=.", "not a number from 0 to 0.999"),
        ("min-speed=00.5", "not a number from 0 to 0.999"),
        ("min-speed=0.5x", "not a number from 0 to 0.999"),
        ("min-speed=nan", "not a number from 0 to 0.999"),
        ("min-speed=0.80,min-speed=0.75", "min-speed is given twice with different values (0.8 and 0.75)"),
        ("min-speed", "min-speed needs a value"),
        ("checkpoint=maybe", "write checkpoint, checkpoint=yes or checkpoint=no"),
        ("alone=2", "write alone, alone=yes or alone=no"),
        ("model=a,,alone", "empty item"),
        ("model=a,", "empty item"),
        (",", "empty item"),
        ("=", 'unknown key ""'),
        ("no", "write --no-muri"),
        ("0", "write --no-muri"),
        ("model=a" + ",model=a" * 200, "longer than"),
    ],
)
def test_malformed_text_is_refused(options: Options, text: str, complaint: str) -> None:
    outcome = options(f"cli:--muri={text}")
    assert outcome.mark is None
    assert complaint in outcome.error


@pytest.mark.parametrize(
    "arguments",
    [
        ["cli:--muri=model=a", "cli:--muri=model=b"],
        ["cli:--muri=model=a,model=b"],
        ["cli:--muri=alone=1,alone=0"],
        ["cli:--muri=checkpoint", "cli:--muri=checkpoint=no"],
        ["cli:--muri=duration=60", "cli:--muri=duration=61"],
        ["cli:--muri=batch-size=1,batch-size=2"],
        ["cli:--muri", "cli:--no-muri"],
        ["cli:--no-muri", "cli:--muri=model=a"],
        ["script:--muri", "script:--no-muri"],
    ],
)
def test_contradictions_are_refused(options: Options, arguments: list[str]) -> None:
    outcome = options(*arguments)
    assert outcome.mark is None
    assert "given twice with different values" in outcome.error or "contradict each other" in outcome.error


@pytest.mark.parametrize(
    ("arguments", "mark"),
    [
        ([], "none"),
        (["cli:--no-muri"], "none"),
        (["cli:--no-muri", "cli:--no-muri"], "none"),
        (["cli:--muri", "cli:--muri"], "on"),
        (["cli:--muri", "cli:--muri=model=a", "cli:--muri=alone"], "model=a,alone=1"),
        (["script:--muri=model=a", "cli:--muri=model=b"], "model=b"),
        (["script:--muri=model=a", "env:--muri=model=c"], "model=c"),
        (["env:--muri=model=c", "cli:--muri"], "model=c"),
        (["env:--muri=model=c", "cli:--muri=model=b"], "model=b"),
        (["script:--muri=model=a,alone", "cli:--muri=alone=no"], "model=a"),
        (["script:--muri=model=a", "cli:--no-muri"], "none"),
        (["env:--muri", "cli:--no-muri"], "none"),
        (["env:--muri", "script:--no-muri"], "on"),
        (["script:--no-muri", "cli:--muri=model=b"], "model=b"),
        (["script:--muri=model=a", "env:--no-muri", "cli:--muri=alone"], "alone=1"),
    ],
)
def test_layers(options: Options, arguments: list[str], mark: str) -> None:
    assert options(*arguments) == Outcome(mark, "")


@given(st.text(alphabet=string.ascii_letters + string.digits + "=,-_+./: é\t", max_size=80))
def test_any_text_is_canonical_or_explained(options: Options, text: str) -> None:
    outcome = options(f"cli:--muri={text}")
    if outcome.mark is None:
        assert outcome.error.strip()
    else:
        assert CANONICAL.fullmatch(outcome.mark)


@given(
    model=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+/-]{0,63}", fullmatch=True),
    batch_size=st.integers(1, 10**9),
    duration_s=st.integers(1, 3650 * 86400),
    checkpoint=st.booleans(),
    alone=st.booleans(),
    order=st.permutations(range(5)),
)
def test_order_of_keys_does_not_matter(
    options: Options,
    model: str,
    batch_size: int,
    duration_s: int,
    checkpoint: bool,
    alone: bool,
    order: list[int],
) -> None:
    items = [
        f"model={model}",
        f"batch-size={batch_size}",
        f"duration={duration_s}s",
        f"checkpoint={int(checkpoint)}",
        f"alone={int(alone)}",
    ]
    expected = [items[0], items[1], f"duration={duration_s}"] + ["checkpoint=1"] * checkpoint + ["alone=1"] * alone
    text = ",".join(items[index] for index in order)
    assert options(f"cli:--muri={text}") == Outcome(",".join(expected), "")
