"""Two members that run the same code at once, and meet in it."""

import textwrap

from launcher_harness import Launcher, ends

_MEET = """\
import os, sys, time
me, other = sys.argv[1:3]
def meet(where):
    open(f"{place}/{{where}}-{{me}}", "w").close()
    end_s = time.monotonic() + 240
    while not os.path.exists(f"{place}/{{where}}-{{other}}"):
        assert time.monotonic() < end_s, "the other member did not come"
        time.sleep(0.001)
"""


def run_both(
    launcher: Launcher, code: str, *, exit_code: int = 0, own_folders: bool = False, **environment: str
) -> tuple[str, str]:
    """Run code, which may `meet("a place")`, as members 101 and 102 in one runtime; returns their standard output.

    Args:
        launcher: Starts them.
        code: What both run; `me` and `other` are their job ids there.
        exit_code: Its expected exit code.
        own_folders: Whether each has a directory of its own, named by its id.
        environment: Variables of both.
    """
    text = _MEET.format(place=launcher.folder) + textwrap.dedent(code)
    jobs = ("101", "102")
    scripts = [launcher.script(text, folder=job if own_folders else ".") for job in jobs]
    launcher.threads(*jobs)
    members = [
        launcher.member(job, script.name, job, other, cwd=script.parent, **environment)
        for job, other, script in zip(jobs, reversed(jobs), scripts, strict=True)
    ]
    codes = [ends(member) for member in members]
    assert codes == [exit_code] * 2, [launcher.err(job) for job in jobs]
    return launcher.out("101"), launcher.out("102")
