"""Backward passes of a session."""

import sys

from launcher_harness import Launcher, ends


def test_a_thread_that_ran_a_backward_pass_does_not_keep_its_session(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import torch

        def kept(key="muri.session"):
            return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None

        seen = []
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda _: seen.append(kept()))
        weight.sum().backward()
        print(seen[0] and seen[0].member, kept())
        """
    )
    launcher.threads("101")
    assert ends(launcher.member("101", script)) == 0, launcher.err("101")
    # Without the GIL only a GPU's threads are told of the session.
    told = "101" if getattr(sys, "_is_gil_enabled", lambda: True)() else "None"
    assert launcher.out("101") == f"{told} None\n"
