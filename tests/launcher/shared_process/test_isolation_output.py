"""Output by number, from C code and from children reaches the member's own files."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import indent

from launcher_harness import Launcher
from polling import until
from two_members import run_both

WAYS = {
    "os.write": 'os.write(1, b"HERE")',
    "os.dup": 'os.write(os.dup(1), b"HERE")',
    "os.fdopen": 'with os.fdopen(os.dup(1), "w") as f: f.write("HERE")',
    "open(1)": 'with open(1, "w", closefd=False) as f: f.write("HERE")',
    "dup2": 'keep = os.dup(1); os.dup2(2, 1); os.write(1, b""); os.dup2(keep, 1); os.write(1, b"HERE")',
    "C": 'libc.dprintf(1, b"HERE")',
    "C, buffered": 'libc.printf(b"HERE"); libc.fflush(None)',
    "C with the GIL": 'ctypes.PyDLL(None).dprintf(1, b"HERE")',
    "C in a thread": 't = threading.Thread(target=libc.dprintf, args=(1, b"HERE")); t.start(); t.join()',
    "writev": "os.writev(1, [b'HE', b'RE'])",
}

PRELUDE = "import ctypes, os, sys, threading\nlibc = ctypes.CDLL(None)\n"


def test_every_way_to_write_reaches_the_members_own_output(launcher: Launcher) -> None:
    launcher.threads("101", "102")
    pieces = [f"try:\n{indent(code, ' ')}\nfinally: os.write(1, b'|')" for code in WAYS.values()]
    script = launcher.script(PRELUDE + "\n".join(pieces))
    written = launcher.ran("101", script).removesuffix("|").split("|")
    assert dict(zip(WAYS, written, strict=True)) == dict.fromkeys(WAYS, "HERE")
    assert "HERE" not in (launcher.folder / "runtime.log").read_text()


def test_what_threads_and_c_code_of_members_write_at_once_does_not_mix(launcher: Launcher) -> None:
    code = """
        import ctypes, logging, threading
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        libc = ctypes.CDLL(None)

        def write(part):
            for line in range(1000):
                sys.stdout.write(f"{me} {part} {line}\\n")  # as one piece: print() writes the newline apart
                libc.dprintf(1, b"%s C %d\\n", me.encode(), line) if part == 0 else None

        meet("ready")
        threads = [threading.Thread(target=write, args=(part,)) for part in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        sys.stdout.flush()
        logging.info("%s logs", me)
    """
    for job, output in zip(("101", "102"), run_both(launcher, code, PYTHONUNBUFFERED="1"), strict=True):
        assert sorted(output.splitlines()) == sorted(f"{job} {part} {line}" for part in "0123C" for line in range(1000))
        assert launcher.err(job) == f"{job} logs\n"


def test_c_output_without_the_helper_goes_to_the_runtimes_log(launcher: Launcher) -> None:
    runtime = launcher.threads("101")
    children = Path(f"/proc/{runtime.pid}/task/{runtime.pid}/children").read_text().split()
    (helper,) = (pid for pid in children if b"c_output_helper" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(int(helper), signal.SIGKILL)
    until(lambda: "helper process ended" in (launcher.folder / "runtime.log").read_text(), "the warning")
    script = launcher.script(PRELUDE + "libc.dprintf(2, b'from C\\n'); print('fine')\n")
    assert launcher.ran("101", script) == "fine\n"
    assert launcher.err("101") == ""
    assert "from C" in (launcher.folder / "runtime.log").read_text()


REPLACED = """
import contextlib, io, sys

class Loud:
    def __init__(self, stream): self.stream = stream
    def write(self, text): return self.stream.write(text.upper())
    def flush(self): self.stream.flush()

before = sys.stdout
sys.stdout = sys.stdout
print("itself", sys.stdout is before is sys.__stdout__)
with contextlib.redirect_stdout(io.StringIO()) as caught:
    print("caught", file=sys.stdout)
    print("printed")
    before.write("aside\\n")
sys.stdout = Loud(sys.stdout)
print("loud")
sys.stdout = None
print("nowhere")
sys.stdout = sys.__stdout__
print(caught.getvalue().split(), sys.stdout is before)
"""
WRITTEN = "itself True\naside\nLOUD\n['caught', 'printed'] True\n"


def test_a_stream_can_be_replaced_and_put_back_in_a_session_and_outside_of_one(launcher: Launcher) -> None:
    install = "from muri.launcher.shared_process.standard_files import install_streams\ninstall_streams()\n"
    for before in ("", install):
        command = [sys.executable, "-c", before + REPLACED]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == WRITTEN, before
    launcher.threads("101")
    assert launcher.ran("101", launcher.script(REPLACED)) == WRITTEN
