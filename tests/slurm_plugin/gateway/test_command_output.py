"""Output of a process is read up to a limit, in little memory."""

import signal
import sys
import tracemalloc

import pytest

from muri.slurm_plugin.gateway import slurm_commands
from muri.slurm_plugin.gateway.base import CommandTimeoutError, SlurmUnreachableError, TooLongAnswerError
from muri.slurm_plugin.gateway.slurm_commands import Collected, LinesWith, SlurmCommands, run_taking


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def test_output_and_errors_are_kept_apart() -> None:
    collected = Collected()
    script = "import sys; sys.stdout.write('o' * 10**6); sys.stderr.write('e' * 10**6); sys.exit(3)"
    code, errors = run_taking(python(script), {}, 30.0, collected.take)
    assert (code, len(collected.content), errors) == (3, 10**6, b"e" * 65536)


def test_a_process_that_prints_without_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_commands, "MOST_OUTPUT", 10**6)
    with pytest.raises(TooLongAnswerError, match="more than 1000000 bytes") as caught:
        SlurmCommands().run("read", python("while True: print('x' * 1000)"))
    assert not isinstance(caught.value, SlurmUnreachableError)


SLOW = "import time; time.sleep(60)"


@pytest.mark.parametrize("script", [SLOW, f"import os; os.close(1); os.close(2); {SLOW}", "while True: print()"])
def test_a_process_that_takes_too_long_is_ended(script: str) -> None:
    with pytest.raises(CommandTimeoutError, match=r"within 0\.5 s"):
        SlurmCommands(timeout_s=0.5).lines("read", python(script), b"x", 10)


def test_what_tells_the_caller_to_stop_does_not_end_a_command() -> None:
    """Sent by the command itself, as no test can hit the moment between its fork and its session."""
    script = "import os, signal as s; [os.kill(os.getpid(), each) for each in (s.SIGTERM, s.SIGINT)]; print('done')"
    collected = Collected()
    code, _ = run_taking(python(script), {}, 30.0, collected.take)
    assert (code, collected.content) == (0, b"done\n")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}  # the caller hears them


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_only_lines_with_the_word_are_kept(size: int) -> None:
    text = b"a muri   \nb\n\nmuri" + b"x" * 99 + b"\nmuri\xff\nlast muri"
    lines = LinesWith(b"muri", 50)
    for start in range(0, len(text), size):
        lines.take(text[start : start + size])
    assert lines.lines() == [b"a muri   ", b"muri\xff", b"last muri"]


def test_lines_without_the_word_take_no_memory() -> None:
    lines, padded = LinesWith(b"muri", 20_000), b"x".ljust(17_000) + b"\n"
    tracemalloc.start()
    for _ in range(2_000):
        lines.take(padded)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
    assert lines.lines() == []
