"""Output by number, from C code and from children reaches the member's own files."""

import os
import signal
from pathlib import Path
from textwrap import indent

import pytest
from launcher_harness import Launcher, ends
from polling import until

WAYS = {
    "os.write": 'os.write(1, b"HERE")',
    "os.dup": 'os.write(os.dup(1), b"HERE")',
    "os.fdopen": 'with os.fdopen(os.dup(1), "w") as f: f.write("HERE")',
    "open(1)": 'with open(1, "w", closefd=False) as f: f.write("HERE")',
    "dup2": 'keep = os.dup(1); os.dup2(2, 1); os.write(1, b""); os.dup2(keep, 1); os.write(1, b"HERE")',
    "os.system": 'assert os.system("printf HERE; exit 3") == 3 << 8',
    "os.popen": 'assert os.popen("printf HERE").read() == "HERE"; os.system("printf HERE")',
    "subprocess": 'subprocess.run(["printf", "HERE"], check=True)',
    "posix_spawn": 'os.waitpid(os.posix_spawnp("printf", ["printf", "HERE"], os.environ), 0)',
    "C": 'libc.dprintf(1, b"HERE")',
    "C, buffered": 'libc.printf(b"HERE"); libc.fflush(None)',
    "C with the GIL": 'ctypes.PyDLL(None).dprintf(1, b"HERE")',
    "C in a thread": 't = threading.Thread(target=libc.dprintf, args=(1, b"HERE")); t.start(); t.join()',
    "writev": "os.writev(1, [b'HE', b'RE'])",
}

EXEC = 'os.execlp("printf", "printf", "HERE")'

PRELUDE = "import ctypes, os, subprocess, sys, threading\nlibc = ctypes.CDLL(None)\n"


def test_every_way_to_write_reaches_the_members_own_output(launcher: Launcher) -> None:
    launcher.threads("101", "102")
    pieces = [f"try:\n{indent(code, ' ')}\nfinally: os.write(1, b'|')" for code in WAYS.values()]
    script = launcher.script(PRELUDE + "\n".join(pieces) + "\n" + EXEC)
    assert ends(launcher.member("101", script)) == 0, launcher.err("101")
    assert dict(zip([*WAYS, "exec"], launcher.out("101").split("|"), strict=True)) == dict.fromkeys(
        [*WAYS, "exec"], "HERE"
    )
    assert "HERE" not in (launcher.folder / "runtime.log").read_text()


def test_members_that_write_from_c_at_once_do_not_mix(launcher: Launcher) -> None:
    script = launcher.script(PRELUDE + "for i in range(500): libc.dprintf(1, b'%s %d\\n', sys.argv[1].encode(), i)\n")
    launcher.threads("101", "102")
    running = [launcher.member(member, script, member) for member in ("101", "102")]
    assert [ends(process) for process in running] == [0, 0]
    for member in ("101", "102"):
        assert launcher.out(member).splitlines() == [f"{member} {i}" for i in range(500)]


def test_a_subprocess_may_still_gain_rights(launcher: Launcher) -> None:
    launcher.threads("101")
    assert (
        ends(launcher.member("101", launcher.script("import os; os.system('grep NoNewPrivs /proc/self/status')"))) == 0
    )
    assert launcher.out("101").split() == ["NoNewPrivs:", "0"]


@pytest.mark.parametrize("off", [True, False])
def test_c_output_without_the_helper_goes_to_the_runtimes_log(launcher: Launcher, off: bool) -> None:
    if off:
        launcher.environment["MURI_C_OUTPUT"] = "0"
    runtime = launcher.threads("101")
    if not off:
        children = Path(f"/proc/{runtime.pid}/task/{runtime.pid}/children").read_text().split()
        (helper,) = (pid for pid in children if b"c_output_helper" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(helper), signal.SIGKILL)
        until(lambda: "helper process ended" in (launcher.folder / "runtime.log").read_text(), "the warning")
    assert (
        ends(launcher.member("101", launcher.script(PRELUDE + "libc.dprintf(2, b'from C\\n'); print('fine')\n"))) == 0
    )
    assert launcher.out("101") == "fine\n" and launcher.err("101") == ""
    assert "from C" in (launcher.folder / "runtime.log").read_text()
