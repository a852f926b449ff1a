"""Backward passes of a session."""

import ctypes
import sys

import pytest
from launcher_harness import Launcher

from muri.launcher.shared_process.threads_and_processes import _owning_stash


def test_a_thread_that_ran_a_backward_pass_does_not_keep_its_session(launcher: Launcher) -> None:
    script = launcher.script("""
        import torch

        def kept(key="muri.session"):
            return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None

        seen = []
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda _: seen.append(kept()))
        weight.sum().backward()
        print(seen[0] and seen[0].member, kept())
    """)
    launcher.threads("101")
    assert launcher.ran("101", script) == "101 None\n"


class Core:
    """Keeps an object for a thread: as PyTorch 2.11, which takes over a reference of the caller, or as 2.13."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.held: list[object] = []

    def _stash_obj_in_tls(self, _key: str, value: object) -> None:
        for address in self.held if self.takes else ():
            ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
        self.held[:] = [id(value) if self.takes else value]


@pytest.mark.parametrize("takes", [True, False])
def test_whoever_stashes_a_session_keeps_its_own_reference(takes: bool) -> None:
    stash, session = _owning_stash(Core(takes=takes)), object()
    references = sys.getrefcount(session)
    for _ in range(100):
        stash("muri.session", session)
        stash("muri.session", None)
    assert sys.getrefcount(session) == references
    stash("muri.session", session)
    assert sys.getrefcount(session) == references + 1
