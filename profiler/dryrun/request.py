"""What a dry run is asked for and how it answers: the environment and the file between it and its script."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.errors import UsageError

DRY_RUN_VARIABLE: Final = "MURI_DRY_RUN"
DRY_RUN_RESULT_VARIABLE: Final = "MURI_DRY_RUN_RESULT"
DEFAULT_ITERATIONS: Final = 40
DEFAULT_STEADY_S: Final = 60.0

_OF_SCRIPT: Final = ".found"
_FORMS: Final = (
    "give auto, auto:iterations:seconds (at most so many measured iterations and seconds, for example auto:40:60),"
    " or iterations:warm-up (for example 30:10)"
)


class DryRunError(UsageError):
    """A dry run is asked for that makes no sense."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a dry run may take.

    Attributes:
        iterations: Most iterations that are measured.
        steady_s: Most seconds of measuring, once the script has warmed up.
        fixed_warmup: Leave out so many first iterations and measure exactly `iterations`, whatever they look
            like; None: find out when the script has warmed up, and stop as soon as the means are sure.
        time_limit_s: Most seconds in all, with start-up and warm-up.
    """

    iterations: int = DEFAULT_ITERATIONS
    steady_s: float = DEFAULT_STEADY_S
    fixed_warmup: int | None = None
    time_limit_s: float = 600.0

    def __post_init__(self) -> None:
        """Refuse limits under which nothing can be measured.

        Raises:
            DryRunError: A limit is not positive.
        """
        if self.iterations < 1:
            raise DryRunError(f"a dry run of {self.iterations} iterations: there must be more iterations than warm-up")
        if not (self.steady_s > 0 and self.time_limit_s > 0):
            raise DryRunError(f"a dry run of {self.steady_s:g} s within {self.time_limit_s:g} s: both must be above 0")

    @property
    def text(self) -> str:
        """The value of MURI_DRY_RUN."""
        if self.fixed_warmup is not None:
            return f"{self.iterations + self.fixed_warmup}:{self.fixed_warmup}"
        return f"auto:{self.iterations}:{self.steady_s:g}"

    @classmethod
    def parse(cls, text: str) -> "Limits":
        """Read a value of MURI_DRY_RUN.

        Raises:
            DryRunError: It is malformed.
        """
        match text.split(":"):
            case ["auto"]:
                return cls()
            case ["auto", iterations, steady_s] if iterations.isdecimal() and _is_number(steady_s):
                return _checked(text, int(iterations), float(steady_s), None)
            case [total, warmup] if total.isdecimal() and warmup.isdecimal():
                return _checked(text, int(total) - int(warmup), DEFAULT_STEADY_S, int(warmup))
        raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: {_FORMS}")


def _checked(text: str, iterations: int, steady_s: float, fixed_warmup: int | None) -> Limits:
    try:
        return Limits(iterations, steady_s, fixed_warmup)
    except DryRunError as error:
        raise DryRunError(f"{DRY_RUN_VARIABLE}={text!r}: {error}") from error


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


@dataclass(frozen=True, slots=True)
class DryRunRequest:
    """What to measure.

    Attributes:
        limits: How much it may take.
        result_path: Where the result goes.
    """

    limits: Limits
    result_path: Path

    @property
    def progress_path(self) -> Path:
        """Where the script says every second how far it is."""
        name = self.result_path.name.removesuffix(_OF_SCRIPT)
        return self.result_path.with_name(f"{name}.progress")

    def for_script(self) -> "DryRunRequest":
        """What the script's own process is asked for, whose result still has to be completed."""
        return replace(self, result_path=self.result_path.with_name(self.result_path.name + _OF_SCRIPT))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "DryRunRequest | None":
        """Read MURI_DRY_RUN and MURI_DRY_RUN_RESULT; None when no dry run is asked for.

        Raises:
            DryRunError: One is malformed or the other is missing.
        """
        text = environment.get(DRY_RUN_VARIABLE)
        if not text:
            return None
        result = environment.get(DRY_RUN_RESULT_VARIABLE)
        if not result:
            raise DryRunError(f"{DRY_RUN_VARIABLE} is set but {DRY_RUN_RESULT_VARIABLE} does not say where to write")
        return cls(Limits.parse(text), Path(result).absolute())

    def environment(self) -> dict[str, str]:
        """The variables that ask a script for this."""
        return {DRY_RUN_VARIABLE: self.limits.text, DRY_RUN_RESULT_VARIABLE: str(self.result_path)}
