"""docs/releases.md tells the truth: each release is asked again."""

from sandbox.driver import Driver
from sandbox.releases import PAGE, PROBES, SAME_SECOND, answers_on_page, examine
from sandbox.support import Progress


def test_a_release_can_do_what_the_page_says(site: Driver) -> None:
    said = answers_on_page(PAGE.read_text(encoding="utf-8"))[site.instance.suite]
    questions = [each for each in PROBES if each != SAME_SECOND]
    found = examine(site, Progress(), questions).answers
    assert {each: found[each].works for each in questions} == {each: said[each][0] == "✓" for each in questions}
