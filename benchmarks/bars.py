"""What the benchmarks' figures have to reach, and how they say so."""

from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Bar:
    """One figure that has to reach something."""

    case: str
    what: str
    measured: float
    needed: str
    passed: bool

    def __str__(self) -> str:
        """The verdict, in a line."""
        return f"{'pass' if self.passed else 'FAIL'}  {self.case}: {self.what}: {self.measured:g} ({self.needed})"


def tell(text: str) -> None:
    """Progress, for people."""
    click.echo(text, err=True)
