"""Text of others: JSON and YAML are data or a ValueError, and what reaches a terminal or a log forges nothing there."""

import io
import json
import logging
import re

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from muri.commands import run_command
from muri.errors import UsageError
from muri.terminal import PlainConsole, cell, say, say_columns
from muri.text import MOST_LEVELS, FewWarnings, json_of, log_handler, printable, printable_lines, yaml_of

DEEP = ("[" * 5_000, "[" * MOST_LEVELS + "[]" + "]" * MOST_LEVELS, '{"a":' * 500 + "1" + "}" * 500)
NO_YAML = ("a: &x [*x]", "!!int ''", "!!timestamp x", "a: " + "9" * 5000, "2001-13-45", "{a: [1", "[1]: 3", "\0")
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 50))


def test_what_cannot_be_used_is_one_kind_of_error() -> None:
    for read, text in [(read, text) for read in (json_of, yaml_of) for text in DEEP] + [(yaml_of, t) for t in NO_YAML]:
        with pytest.raises(ValueError, match="levels" if text in DEEP else r"\w"):
            read(text)
    assert all(json.dumps(read("[" * MOST_LEVELS + "]" * MOST_LEVELS), indent=1) for read in (json_of, yaml_of))
    assert len(yaml_of(ALIASES)) == 50, "aliases are read without being written out"


@pytest.mark.parametrize(
    ("text", "lines"),
    [("a: 1\nb: 2\na: 3", (1, 3)), ("x:\n- {a: 1,\n   'a': 2}", (2, 3)), ("x:\n  1: 2\n  1: 2", (2, 3))],
)
def test_a_key_that_stands_twice_is_an_error_with_both_lines(text, lines) -> None:
    with pytest.raises(ValueError, match=f"in line {lines[0]} and again in line {lines[1]}"):
        yaml_of(text)


def test_keys_of_other_mappings_may_be_the_same_and_merged_ones_replaced() -> None:
    assert yaml_of("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n")["b"] == {"x": 3, "y": 2}
    assert yaml_of("- {1: 2}\n- {'1': 2, 1: 3}")[1] == {"1": 2, 1: 3}


def test_a_place_in_the_text_is_told_by_the_name_of_its_source() -> None:
    with pytest.raises(ValueError, match=r"in /etc/muri/muri\.yaml, line 2"):
        yaml_of("a: 1\nb: [", "/etc/muri/muri.yaml")


HOSTILE = "a\n2026-01-01T00:00:00Z ERROR forged\r\x1b]0;title\x07\x1b[2J\x9b31m\u202eevil\u2028x\udce9[red]:bomb:"


@given(st.text())
def test_what_is_shown_is_one_line_of_visible_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in printable_lines(text).split("\n"))
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize("text", ["", "größe γ = 0.9 → 中文", "[red]"])
def test_ordinary_text_stays_and_other_is_escaped_as_in_python(text: str) -> None:
    assert printable(text + "\n\x1b\udce9\u202e") == text + r"\n\x1b\udce9\u202e"


def logged(record: str, *, error: Exception | None = None) -> str:
    handler = log_handler()
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream := io.StringIO())
    logger = logging.Logger("muri.test")
    logger.addHandler(handler)
    logger.error("job %s", record, exc_info=error)
    return stream.getvalue()


def test_a_message_is_one_line_of_the_log() -> None:
    (line,) = logged(HOSTILE).splitlines()
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ERROR muri\.test: job a\\n2026-", line)
    assert line.isprintable()


def test_a_long_text_does_not_fill_the_log() -> None:
    line = logged("\n" * 100_000)
    assert len(line) < 2100
    assert line.endswith(" more characters)\n")


def test_warnings_are_logged_once_an_hour_and_a_few_of_a_place() -> None:
    now_s, lines = [0.0], io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.addFilter(FewWarnings(lambda: now_s[0]))
    logger = logging.Logger("muri.test")
    logger.addHandler(handler)
    for cycle, count in enumerate((0, 1000, 1000, 2, 2)):
        now_s[0] = 3600.0 * (cycle > 2)
        for job in range(count):
            logger.warning("job %d is odd", job)
        logger.error("cycle %d skipped", cycle)
    first, later = lines.getvalue().splitlines()[:53], lines.getvalue().splitlines()[53:]
    assert len(set(first)) == 50 + 3
    left_out = "job 0 is odd (1950 such lines were left out before)"
    assert later == [left_out, "job 1 is odd", "cycle 3 skipped", "cycle 4 skipped"]


def test_no_line_of_a_traceback_looks_like_a_record() -> None:
    first, *others = logged("1", error=ValueError(HOSTILE)).splitlines()
    assert first.endswith("job 1")
    assert any("ValueError" in line for line in others)
    assert all(line.startswith("    ") and line.isprintable() for line in others)


def test_a_table_shows_markup_emoji_names_and_control_characters_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("[bold]JOB", "NAME")
    table.add_row("1", cell(HOSTILE))
    table.add_row("[red]2", "\x1b[31m:bomb:")
    PlainConsole(width=300).print(table)
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.splitlines())
    assert len(shown.splitlines()) == 6
    for text in (printable(HOSTILE), "[bold]JOB", "[red]2", r"\x1b[31m:bomb:"):
        assert text in shown


def test_columns_are_as_wide_as_their_widest_text_and_show_it_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    say_columns(("JOB", "NAME"), [("1", "[bold]\x1b[31m"), ("12345", "模型")], {"NAME"})
    assert capsys.readouterr().out.splitlines() == ["  JOB  NAME", r"    1  [bold]\x1b[31m", "12345  模型"]
    say_columns(("NAME", "JOB"), [("模型", "1"), ("x" * 200, "2")], {"NAME"})
    assert capsys.readouterr().out.splitlines()[1:] == ["模型" + " " * 196 + "    1", "x" * 200 + "    2"]


def test_lines_and_errors_of_commands_are_shown_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    def show() -> None:
        say(HOSTILE)
        raise UsageError(f"first\n{HOSTILE}")

    assert run_command(show, []) == 2
    captured = capsys.readouterr()
    assert captured.out == printable(HOSTILE) + "\n"
    assert captured.err == f"muri: first\n{printable_lines(HOSTILE)}\n"


def test_a_character_that_the_terminal_lacks_costs_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    assert run_command(click.Command("show", callback=lambda: print("γ →\udce9")), []) == 0
    stream.flush()
    assert stream.buffer.getvalue() == b"\\u03b3 \\u2192\\udce9\n"
