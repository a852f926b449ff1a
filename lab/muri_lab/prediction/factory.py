"""A user's model for prediction: `FILE.py:factory`, and its inputs. PyTorch is imported when a model is built."""

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from muri.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

_INPUT: Final = re.compile(r"(?:(float|int):)?(\d+(?:x\d+)*)")


class FactoryError(UsageError):
    """The model cannot be built from FILE.py:FACTORY and its inputs."""


class InputSpec(NamedTuple):
    """One input of the model, without the batch."""

    shape: tuple[int, ...]  # Of one sample
    integer: bool  # Whether it holds whole numbers, such as token ids

    @classmethod
    def parse(cls, text: str) -> "InputSpec":
        """Read "3x32x32", "float:128" or "int:128"."""
        match = _INPUT.fullmatch(text.strip())
        shape = tuple(int(part) for part in match[2].split("x")) if match else ()
        if match is None or math.prod(shape) == 0:
            raise FactoryError(
                f"--input {text!r}: give the shape of one sample without the batch, such as 3x32x32, "
                "with int: before it for token ids, such as int:128"
            )
        return cls(shape, match[1] == "int")

    def example(self, batch_size: int) -> "torch.Tensor":
        """A batch of the right shape and type that holds nothing."""
        import torch  # an extra

        dtype = torch.int64 if self.integer else torch.float32
        return torch.empty((batch_size, *self.shape), dtype=dtype, device="meta")


def build(target: str) -> "nn.Module":
    """The module that `FILE.py:factory` makes, on the meta device where the factory allows that."""
    try:
        import torch  # an extra
    except ImportError as error:
        raise FactoryError(f"PyTorch cannot be imported ({error}): pip install 'muri[torch]'") from error
    path, attribute = _split(target)
    with _importable(path.parent):
        factory = _factory(path, attribute)
        try:
            with torch.device("meta"):
                model = factory()
        except (Exception, SystemExit):  # weights are looked at or loaded: then make it for real
            model = _call(factory, target)
    if not isinstance(model, torch.nn.Module):
        raise FactoryError(f"{target} returned no module but {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _call(factory: Callable[[], Any], target: str) -> Any:
    try:
        return factory()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{target} failed: {type(error).__name__}: {error}") from error


def _split(target: str) -> tuple[Path, str]:
    """The file and the name of the function in it."""
    name, colon, attribute = target.rpartition(":")
    if not colon or not attribute.isidentifier():
        raise FactoryError(f"--module {target!r}: give a file and a function in it, such as model.py:build")
    path = Path(name)
    if not path.is_file():
        raise FactoryError(f"--module {target}: there is no file {path}")
    return path, attribute


def _factory(path: Path, attribute: str) -> Callable[[], Any]:
    """The function in the file."""
    found = getattr(_load(path), attribute, None)
    if not callable(found):
        reason = "is not defined there" if found is None else "is not callable"
        raise FactoryError(
            f"--module {path}:{attribute}: {attribute} {reason}; {path} must define {attribute}(), which takes no "
            "arguments and returns the model"
        )
    wanted: Callable[[], Any] = found
    return wanted


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """What lies beside the file can be imported, as beside a script."""
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


def _load(path: Path) -> Any:
    """Run the file as a module under a name that hides no other."""
    name = f"_muri_predicted_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise FactoryError(f"{path} is not a Python file; its name must end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    return module
