"""--muri and --no-muri in three layers, collected by the SPANK plugin and read by job_submit."""

from collections.abc import Callable

import pytest
from option_sources import Outcome

Options = Callable[..., Outcome]
VALID_KEYS = ["model=NAME", "batch-size=N", "duration=TIME", "checkpoint:", "alone:", "accumulate=N", "min-speed=X"]


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("", "on"),
        ("=on", "on"),
        ("=model=facebook/opt-1.3b", "model=facebook/opt-1.3b"),
        ("=alone=1,checkpoint=YES,duration=1h,batch-size=64,model=m",
         "model=m,batch-size=64,duration=3600,checkpoint=1,alone=1"),
        ("=alone=0,batch-size=0016", "batch-size=16"),
        ("=model=a,model=a", "model=a"),
        ("=duration=60,duration=1:00:00", "duration=3600"),
        ("=model=" + "x" * 64, "model=" + "x" * 64),
        ("=min-speed=.75", "min-speed=0.75"),
        ("=min-speed=0.500,min-speed=0.5", "min-speed=0.5"),
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
    ["0", "0s", "00:00:00", "-5", "1:2:3:4", "1-", "-", "1-2-3", "1h30m", "1.5h", "2w", "h", "1:",
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
        ("batch", "batch-size"), ("ckeckpoint", "checkpoint"), ("aloen", "alone"), ("gpus", ""), ("x", ""),
        ("MODEL", ""), ("q" * 100, ""),
    ],
)  # fmt: skip
def test_unknown_key_suggests_the_nearest_if_it_is_near_and_lists_all(options: Options, typed: str, meant: str) -> None:
    outcome = options(f"cli:--muri={typed}=x")
    assert f'unknown key "{typed[:64]}"' in outcome.error
    assert outcome.error.partition('did you mean "')[2].partition('"')[0] == meant
    assert all(key in outcome.error for key in VALID_KEYS)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("model", "model needs a value"),
        ("model=", "model= has no value"),
        ("batch-size=0", "batch-size=0: not a whole number"),
        ("batch-size=1e3", "batch-size=1e3: not a whole number"),
        ("model=-x", "starts with a letter or digit"),
        ("model=" + "x" * 65, "has 65 characters; at most 64"),
        ("accumulate=0", "not a whole number from 1 to 1024; for example accumulate=8"),
        ("accumulate=4,accumulate=2", "accumulate is given twice with different values (4 and 2)"),
        ("min-speed=1.0", "not a number from 0 to 0.999 with at most three digits after the point; for example"),
        ("min-speed=0.80,min-speed=0.75", "min-speed is given twice with different values (0.8 and 0.75)"),
        ("checkpoint=maybe", "write checkpoint, checkpoint=yes or checkpoint=no"),
        ("model=a,,alone", "empty item"),
        ("=", 'unknown key ""'),
        ("no", "write --no-muri"),
        ("model=a" + ",model=a" * 200, "longer than"),
        ("duration=1 h", "only letters, digits and"),
        ("model=a\nmuri-plan:{}", "only letters, digits and"),
        ("model=a;c:alone", "only letters, digits and"),
        ("model=%n%s", "only letters, digits and"),
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
        ["cli:--muri=alone=1,alone=0"],
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


@pytest.mark.parametrize(
    ("arguments", "texts", "mark"),
    [
        (["cli:--muri"], "c:", "on"),
        (["cli:--muri=alone", "script:--muri=model=a", "cli:--muri=model=b"], "s:model=a;c:alone;c:model=b",
         "model=a,alone,model=b"),
        (["env:--muri=" + "x" * 997, "cli:--muri=1"], "e:" + "x" * 997 + ";c:1", "x" * 997 + ",1"),
        (["script:--muri=model=a", "env:--no-muri", "cli:--muri=alone"], "c:alone", "alone"),
    ],
)  # fmt: skip
def test_the_texts_are_passed_on_as_they_are(collected: Options, arguments: list[str], texts: str, mark: str) -> None:
    outcome = collected(*arguments)
    assert (outcome.texts, outcome.mark) == (texts, mark)


def test_no_layer_outgrows_its_place(collected: Options) -> None:
    for count in (1, 2, 300, 400):
        outcome = collected(*["cli:--muri"] * count, *["env:--muri=" + "m" * (1000 - count)], "script:--muri")
        assert (outcome.mark is None) == (count > 335), count
    assert "longer than 1000 characters" in collected("cli:--muri=a", "cli:--muri=" + "m" * 998).error
