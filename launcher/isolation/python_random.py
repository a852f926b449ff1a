"""Python's `random`: the module's functions draw from the session's own generator."""

import os
import random
from typing import Any

from muri.launcher.context import PerSession, current_session
from muri.launcher.isolation.dispatch import by_session

_generators: PerSession[random.Random] = PerSession(random.Random)


class SessionRandom(random.Random):
    """Stands for `random._inst`, which some libraries use."""

    def __getattribute__(self, name: str) -> Any:
        """Read from the session's generator."""
        session = current_session()
        return getattr(_PLAIN if session is None else _generators.of(session), name)


_PLAIN: random.Random = random._inst


def _reseed_in_child() -> None:
    """A forked child draws other numbers than its parent; Python does the same."""
    session = current_session()
    if session is not None:
        _generators.of(session).seed()


def install_python_random() -> None:
    """Replace the functions and the instance that they are methods of."""
    for name, function in list(vars(random).items()):
        if getattr(function, "__self__", None) is _PLAIN:
            setattr(random, name, by_session(function, _generators))
    random._inst = SessionRandom()
    os.register_at_fork(after_in_child=_reseed_in_child)
