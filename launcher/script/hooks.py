"""Hooks in PyTorch for scripts that don't call Muri, installed when the script imports PyTorch.

This module finds the clock that a thread's hooks feed, and where one iteration ends and the next begins. `data_loading`
sees the DataLoader and its workers, `compute` forward, backward and optimizer steps, `network` collectives and DDP.
`compute` also keeps hooks away from `torch.compile`. Nothing imports torch before the script does. See docs/scripts.md.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Final

from muri.errors import MuriError
from muri.launcher.job.stage_clock import PROPAGATE, StageClock
from muri.launcher.script.script_clock import current_clock

AUTOMATIC_VARIABLE: Final = "MURI_AUTOMATIC"

YIELD_INTERVAL_S: Final = 0.005
"""Layers, gradients and samples offer to yield at most this often: the offer itself waits for the GPU."""

NETWORK_HOOKS: Final = frozenset({"torch.distributed", "DistributedDataParallel"})

BACKWARD_HOOK: Final = "backward"

_BY_STEP: Final = -1
_NOBODY: Final = 0

MOST_ACCUMULATED: Final = 256
"""After so many backward passes without a step the optimizer that a script has made is not what ends its iterations."""

MOST_BACKWARDS: Final = 8
"""After so many backward passes without the module that began the iterations, another one does."""

_WATCH: Final = "automatic_watch"
"""The clock keeps its watch here, so that both end with the script."""


def stages_wanted(environment: Mapping[str, str]) -> bool:
    """Whether hooks may be installed: not with MURI_AUTOMATIC=0."""
    return environment.get(AUTOMATIC_VARIABLE, "1") != "0"


class Iterations:
    """Tells the iterations of one script apart by what its hooks see.

    An iteration begins when the script asks a loader for a batch and ends when it asks for the next one, if it trained
    in between; batches without training (validation, fetching ahead) do not count. Without a loader an iteration ends
    with the optimizer's step. Without an optimizer, too, it ends where the module that came first is called again after
    a backward pass.
    """

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock
        self._opener = _NOBODY
        self._open = False
        self._trained = False
        self._evaluated = False
        self._has_optimizer = False
        self._backwards = 0
        self._module: int | None = None
        self._validates = False
        self._pacer: int | None = None
        self._stepped: set[int] = set()

    def ask(self, iterator: object) -> None:
        """Note that the script asks a loader's iterator for a batch."""
        untouched = self._open and not (self._trained or self._evaluated)
        if not (untouched and self._opener not in {_NOBODY, _BY_STEP, id(iterator)}):  # not its second loader
            self._begin(id(iterator))

    def over(self, iterator: int) -> None:
        """Note that the iterator of that `id` had no batch left, or is gone after `break`; from any thread.

        A loop that fetches ahead still trains on the last batch.
        """
        if self._opener == iterator:
            self._opener = _NOBODY

    def work(self, *, trained: bool = False, evaluated: bool = False) -> None:
        """Note a computation; without a loader it begins the first iteration."""
        if not self._open and not self._validates:
            self._begin(_BY_STEP)
        self._trained |= trained
        self._evaluated |= evaluated

    def called(self, module: object, *, evaluated: bool) -> None:
        """Note that a module will be called, which without loader and optimizer may end the iteration."""
        if not self._by_modules:
            return
        if evaluated:
            if self._trained and id(module) == self._module:  # validation, until the module trains again
                self._end()
                self._validates = True
            return
        if self._module is None:
            self._module = id(module)
        elif self._trained and (id(module) == self._module or self._backwards >= MOST_BACKWARDS):
            self._module = id(module)
            self._begin(_BY_STEP)
        self._validates = False

    def backward(self) -> None:
        """Note that a backward pass begins; without any module it ends the iteration before it."""
        if self._by_modules and self._module is None and self._trained:
            self._begin(_BY_STEP)
        self._backwards += 1

    def made(self) -> None:
        """Note that the script makes an optimizer; its steps end iterations."""
        self._has_optimizer = True

    @property
    def _by_modules(self) -> bool:
        return self._opener <= 0 and (not self._has_optimizer or self._backwards > MOST_ACCUMULATED)

    def stepped(self, optimizer: object) -> None:
        """Note an optimizer's step; without a loader it ends the iteration."""
        self._has_optimizer, self._backwards = True, 0
        if self._opener <= 0 and self._paces(id(optimizer)):
            self._begin(_BY_STEP)

    def _paces(self, optimizer: int) -> bool:
        """Whether this optimizer ends iterations: of several, as in a GAN, the first that steps again does."""
        if self._pacer is None or optimizer == self._pacer or optimizer in self._stepped:
            self._pacer = optimizer
            self._stepped.clear()
            return True
        self._stepped.add(optimizer)
        return False

    def close(self) -> None:
        """End the last iteration with the script; its loop may have been left with `break`."""
        if self._open and self._trained and self._opener != _BY_STEP:
            self._end()

    def _end(self) -> None:
        self._open = self._trained = False
        self._clock.end_iteration()

    def _begin(self, opener: int) -> None:
        if not self._trained:
            self._clock.drop_iteration()
        self._opener, self._open = opener, True
        if not self._has_optimizer:
            self._backwards = 0
        self._trained = self._evaluated = False
        self._clock.ask_batch()


class Watch:
    """What the hooks know of one script."""

    def __init__(self, clock: StageClock) -> None:
        self.clock = clock
        self.iterations = Iterations(clock)
        self.trainer: int | None = None  # the thread that trains; only it ends iterations
        self.backward_thread: int | None = None  # the thread that waits for autograd, None outside of backward
        self.after_backward = ExitStack()  # closed when backward is done
        self.iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders' iterators that were asked for a batch
        self.memory: dict[Any, Any] = {}  # kept by single hooks between calls
        self.wanted = stages_wanted(os.environ)  # whether the environment lets hooks work at all

    def is_trainer(self, *, trains: bool) -> bool:
        """Whether the calling thread is the one that trains; the first thread to train becomes it."""
        ident = threading.get_ident()
        if self.trainer is None or trains:
            self.trainer = ident
        return self.trainer == ident


class ThreadState(threading.local):
    """What the hooks know of the calling thread."""

    busy = False  # inside a hook of fetching or of a collective; hooks ignore calls within those
    depth = 0  # calls that hold `propagate`, one inside another
    yield_due_s = 0.0  # when a layer should offer to yield next, on `time.perf_counter`
    watch: Watch | None = None


thread: Final = ThreadState()
_off: set[str] = set()
_in_child: list[bool] = []
os.register_at_fork(after_in_child=lambda: _in_child.append(True))


def watching(hook: str) -> Watch | None:
    """The calling thread's watch; None where the hook must do nothing.

    That is in forked children, once the script marks stages itself, and after the hook failed. The hooks of
    the network go on in a script that marks stages: a collective within its `propagate` would hold the GPU while it
    waits for the other ranks, and two members that do so on different ranks would wait for each other forever.
    """
    if _in_child or hook in _off:
        return None
    try:
        clock = current_clock()
        if clock.explicit and hook not in NETWORK_HOOKS:
            return None
        watch = thread.watch
        if watch is None or watch.clock is not clock:
            watch = thread.watch = clock.__dict__.setdefault(_WATCH, Watch(clock))  # of two threads one's stays
            clock.explains_gaps = not clock.explicit
    except Exception as error:
        switch_off(hook, error)
        return None
    return watch if watch.wanted else None


def begin_propagate(
    hook: str, *, module: object = None, trained: bool = False, evaluated: bool = False, joins: bool = False
) -> Watch | None:
    """Enter `propagate` in the calling thread, if its hook is active; pair with `end_propagate`.

    `trained` marks a part of training, `evaluated` a forward pass without gradients. If it `joins`, what the thread did
    since its last `propagate` belongs to it, such as a loss function.
    """
    try:
        watch = watching(hook)
        if watch is None or watch.backward_thread not in {None, threading.get_ident()}:
            return None  # autograd's own threads: the caller of backward holds the stage
        if watch.is_trainer(trains=trained):
            if module is not None:
                watch.iterations.called(module, evaluated=evaluated)
            elif hook == BACKWARD_HOOK and trained:
                watch.iterations.backward()
            watch.iterations.work(trained=trained, evaluated=evaluated)
        watch.clock.enter(PROPAGATE, joins=joins)
        thread.yield_due_s = perf_counter() + YIELD_INTERVAL_S if watch.clock.shared else float("inf")
        thread.depth += 1
    except Exception as error:
        switch_off(hook, error)
        return None
    return watch


def end_propagate(hook: str, watch: Watch) -> None:
    """Leave `propagate`."""
    thread.depth -= 1
    try:
        watch.clock.leave()
    except Exception as error:
        switch_off(hook, error)


def offer_to_yield(hook: str) -> None:
    """Let another member go first, at a safe place inside a long stage, if the last offer was long ago."""
    now_s = perf_counter()
    if now_s < thread.yield_due_s:
        return
    thread.yield_due_s = now_s + YIELD_INTERVAL_S
    try:
        watch = thread.watch
        if watch is not None and hook not in _off:
            watch.clock.yield_point()
            thread.yield_due_s = perf_counter() + YIELD_INTERVAL_S
    except Exception as error:
        switch_off(hook, error)


def switch_off(hook: str, error: Exception) -> None:
    """Report a hook's own failure and disable the hook; errors of the script are raised again."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != "_call_at_boundary":
        trace = trace.tb_next
    # A function that runs at iteration boundaries is the script's.
    if isinstance(error, MuriError) or (trace is not None and trace.tb_next is not None):
        raise error
    if hook not in _off:
        _off.add(hook)
        print(
            f"muri: automatic stages: the hook for {hook} failed and is switched off ({type(error).__name__}: {error});"
            " the script goes on without it",
            file=sys.stderr,
        )


def replace(place: Any, name: str, function: Any) -> None:
    """Replace PyTorch's own function by a hooked one."""
    setattr(place, name, function)


def guarded_installation(hook: str, install: Callable[[], None]) -> None:
    """Install hooks; report and skip those that this version of PyTorch does not support."""
    try:
        install()
    except Exception as error:
        switch_off(hook, error)


def close_iterations() -> None:
    """Count an iteration that was left with `break`; call at the script's end."""
    watch = thread.watch
    if watch is not None and not watch.clock.explicit and not _in_child:
        watch.iterations.close()
