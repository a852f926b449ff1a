"""Backward passes of a session."""

from launcher_harness import Launcher, ends


def test_a_thread_that_ran_a_backward_pass_does_not_keep_its_session(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import torch
        seen = []
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda _: seen.append(torch._C._get_obj_in_tls("muri.session")))
        weight.sum().backward()
        print(seen[0].member, torch._C._get_obj_in_tls("muri.session"))
        """
    )
    launcher.runtime("101")
    assert ends(launcher.member("101", script)) == 0, launcher.err("101")
    assert launcher.out("101") == "101 None\n"
