"""NumPy's legacy generator: `numpy.random.*` and `numpy.random.mtrand._rand` are the session's own."""

from types import ModuleType
from typing import Any

from muri.launcher.context import PerSession, current_session
from muri.launcher.isolation.dispatch import by_session
from muri.launcher.isolation.import_hooks import after_import


def _session_class(plain: Any, generators: PerSession[Any]) -> type:
    def read(_self: object, name: str) -> Any:
        session = current_session()
        return getattr(plain if session is None else generators.of(session), name)

    return type("SessionRandomState", (type(plain),), {"__getattribute__": read})


def _patch_numpy(numpy_random: ModuleType) -> None:
    mtrand = numpy_random.mtrand
    plain = mtrand._rand
    generators: PerSession[Any] = PerSession(type(plain))
    stand_in = _session_class(plain, generators)()

    def seed(seed: Any = None) -> None:
        """Reseed the legacy generator; see numpy.random.RandomState.seed."""
        stand_in.seed(seed)

    def get_bit_generator() -> Any:
        """The bit generator of the legacy generator."""
        return stand_in._bit_generator

    def set_bit_generator(bitgen: Any) -> None:
        """Give the legacy generator another bit generator."""
        session = current_session()
        if session is None:
            plain_set(bitgen)
        else:
            generators.put(session, type(plain)(bitgen))

    plain_set: Any = getattr(mtrand, "set_bit_generator", None)
    replaced = {"seed": seed, "get_bit_generator": get_bit_generator, "set_bit_generator": set_bit_generator}
    for module in (mtrand, numpy_random):
        for name, function in list(vars(module).items()):
            if name in replaced:
                setattr(module, name, replaced[name])
            elif getattr(function, "__self__", None) is plain:
                setattr(module, name, by_session(function, generators))
    mtrand._rand = stand_in


def install_numpy_random() -> None:
    """Patch NumPy once it is imported."""
    after_import("numpy.random", _patch_numpy)
