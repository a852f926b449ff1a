"""Sub-batches: a batch of B samples runs as s micro-batches of B/s whose gradients are accumulated.

`accumulate` is what scripts call, `planned` says which s is in effect, `splitting` cuts a batch, `losses` reads from
the graph what a loss averages over, and `loop`, `gradients` and
`hooks` do it for scripts that call nothing. See docs/sub-batches.md.
"""

from muri.launcher.accumulation.planned import hooks_wanted as wanted
from muri.launcher.automatic.imports import after_import

__all__ = ["install", "wanted"]


def install() -> None:
    """Let hooks split batches from PyTorch's import on; call once in a process, after those of automatic stages."""
    after_import("torch", _install_hooks)


def _install_hooks() -> None:
    from muri.launcher.accumulation import hooks  # noqa: PLC0415 (imports torch)
    from muri.launcher.automatic.watch import guarded_installation  # noqa: PLC0415 (it imports the stages)

    guarded_installation("sub-batches", hooks.install)
