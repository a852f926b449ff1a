"""docs/releases.md is what `bin/muri-sandbox matrix` writes: every question, every suite, nothing else."""

import datetime

from sandbox.cluster import SUITES
from sandbox.releases import PAGE, PROBES, Answer, Release, answers_on_page, page


def test_a_page_tells_the_answers_newest_release_first() -> None:
    new = Release("forky", "26.05.5", dict.fromkeys(PROBES, Answer(True)))
    old = Release("bookworm", "22.05.8", dict.fromkeys(PROBES, Answer(False, "why | not")))
    text = page([old, new], datetime.date(2026, 1, 2))
    assert "wrote this page on 2026-01-02" in text
    assert text.index("Slurm 26.05.5 (forky)") < text.index("Slurm 22.05.8 (bookworm)")
    told = answers_on_page(text)
    assert told["forky"] == dict.fromkeys(PROBES, "✓")
    assert told["bookworm"] == dict.fromkeys(PROBES, "– why \\| not")


def test_the_page_in_the_documentation_answers_every_question_for_every_suite() -> None:
    told = answers_on_page(PAGE.read_text(encoding="utf-8"))
    assert set(told) == set(SUITES)
    assert all(list(answers) == list(PROBES) for answers in told.values())
    assert all(cell[0] in "✓–" for answers in told.values() for cell in answers.values())
