"""The figures of README.md and docs/ are those of the stored results and of the code."""

import re
import sys
from pathlib import Path

import pytest

from muri_lab.benchmarks import page_marks, pages
from muri_lab.benchmarks.page_tables import TABLES

ROOT = Path(__file__).resolve().parents[3]
NAMES = [str(page.relative_to(ROOT)) for page in pages.all_pages()]
MARKED = [name for name in NAMES if re.search("<!-- (figure|table): ", (ROOT / name).read_text())]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_what_the_results_and_the_code_say(name: str) -> None:
    text = (ROOT / name).read_text()
    assert page_marks.renewed(name, text, TABLES) == text, "run: .venv/bin/python -m muri_lab.benchmarks.pages"


@pytest.mark.parametrize("name", MARKED)
def test_a_changed_digit_is_put_right(name: str) -> None:
    text = (ROOT / name).read_text()
    for mark in page_marks.FIGURE.finditer(text):
        wrong = f"{text[: mark.start(3)]}{mark[3]}9{text[mark.end(3) :]}"
        assert page_marks.renewed(name, wrong, TABLES) == text
    for mark in page_marks.TABLE.finditer(text):
        wrong = f"{text[: mark.start(3)]}{re.sub('[0-9]', '7', mark[3])}x{text[mark.end(3) :]}"
        assert page_marks.renewed(name, wrong, TABLES) == text


def test_check_says_which_line_differs_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    page = tmp_path / "README.md"
    page.write_text("It took <!-- figure: scale:cycle-10k.figures.cpu_s .1f -->0.4<!-- /figure --> s.\n")
    (tmp_path / "docs").mkdir()
    assert pages.main(tmp_path) == 1
    assert (
        "+It took <!-- figure: scale:cycle-10k.figures.cpu_s .1f -->0.5<!-- /figure --> s." in capsys.readouterr().out
    )
    assert "-->0.4<!--" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["pages"])
    assert pages.main(tmp_path) == 0
    assert "-->0.5<!--" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["pages", "--check"])
    assert pages.main(tmp_path) == 0


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("made:rows.1.s .2f", "2.50"),
        ("made:rows[name=the_first&s=0.5].s .1%", "50.0 %"),
        ("max made:rows.s .1f", "2.5"),
        ("1e3 * min made:rows.s / 4 ,.0f", "125"),
        ("sum made:cases.*.*.s .1f", "1.5"),
        ("max made:rows[0:1].s .1f", "0.5"),
        ("made:rows.0.s - made:rows.1.s +.1f", "−2.0"),
        ("count made:rows d", "2"),
        ("made:two_words s", "yes"),
        ("muri.policies.grouping.engine:COLUMN_LIMIT ,d", "1,000,000"),
    ],
)
def test_what_a_mark_can_say(expression: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"rows": [{"name": "the first", "s": 0.5}, {"name": "other", "s": 2.5}], "two words": "yes"}
    made["cases"] = {"a": {"seed 1": {"s": 0.5}, "seed 2": {"s": 0.5}}, "b": {"seed 1": {"s": 0.5}}}
    monkeypatch.setattr(page_marks, "stored", {"made": made}.__getitem__)
    assert page_marks.figure(expression) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a <!-- figure: no-such-file:x d -->1<!-- /figure -->",
            "there is no lab/muri_lab/benchmarks/results/no-such-file.json",
        ),
        ("a <!-- figure: scale:no-such-case.x d -->1<!-- /figure -->", "no-such-case"),
        ("a <!-- figure: muri.clock:NO_SUCH_NAME d -->1<!-- /figure -->", "NO_SUCH_NAME"),
        ("a <!-- figure: scale:cycle-10k.figures d -->1<!-- /figure -->", "is not a figure"),
        ("a <!-- figure: 1 2 d -->1<!-- /figure -->", "1 2 d is not a figure"),
        ("a <!-- figure: scale:cycle-10k.figures.cpu_s d -->1", "lacks its begin or its end"),
        ("<!-- figure: scale:cycle-10k.figures.cpu_s .1f -->0.5<!-- /figure -->", "no line may begin with a figure"),
        ("- <!-- figure: scale:cycle-10k.figures.cpu_s .1f -->0.5<!-- /figure -->", "no line may begin with a figure"),
        ("<!-- table: no-such-table -->\n<!-- /table -->", "there is no table no-such-table"),
    ],
)
def test_a_wrong_mark_is_told_with_its_page(text: str, said: str) -> None:
    with pytest.raises(page_marks.PageError, match=re.escape(said)) as error:
        page_marks.renewed("docs/some.md", text, TABLES)
    assert "docs/some.md" in str(error.value) or "table" in said
