"""Attributes of a module, or of another object of the process, that every session has for itself."""

from types import ModuleType
from typing import Any

from muri.launcher.context import PerSession, current_session


def add_properties(module: ModuleType, properties: dict[str, property]) -> None:
    """Give one module properties; whoever reads `module.name` from outside goes through them.

    The module's own functions, and C code that looks into its dictionary, go on reading the dictionary.
    """
    plain = type(module)

    def new(_class: type, *arguments: Any, **keywords: Any) -> ModuleType:
        """An ordinary module: Python makes every imported module as `type(sys)(name)`."""
        return ModuleType(*arguments, **keywords)

    module.__class__ = type(plain.__name__, (plain,), {"__slots__": (), "__new__": new, **properties})


def session_value(name: str, values: PerSession[dict[str, Any]]) -> property:
    """A property that a session may set for itself; until then it reads what the process has.

    Args:
        name: The attribute's name, also its key in the values.
        values: What the session has set.
    """

    def get(owner: Any) -> Any:
        session = current_session()
        if session is not None and name in (own := values.of(session)):
            return own[name]
        try:
            return owner.__dict__[name]
        except KeyError:
            what = f"{type(owner).__name__} {getattr(owner, '__name__', owner)!r}"
            raise AttributeError(f"{what} has no attribute {name!r}") from None

    def put(owner: Any, value: Any) -> None:
        session = current_session()
        if session is None:
            owner.__dict__[name] = value
        else:
            values.of(session)[name] = value

    return property(get, put)
