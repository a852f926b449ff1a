"""Damages what Slurm prints: documents of JSON, lines of fields, and pyslurm's records."""

from typing import Any, Final

from odd import Odd

_DIGITS: Final = "9" * 5000


def value(odd: Odd) -> Any:
    """A value of any type."""
    number = {"set": odd.one((True, False, odd.figure())), "infinite": odd.figure(), "number": odd.figure()}
    return odd.one((odd.figure(), odd.text(), odd.json(), number, [odd.text()], _DIGITS, -odd.number(), [[]], [None]))


def damaged_table(odd: Odd, table: str) -> str:
    """Return a text of lines and fields with some of its words replaced, and others cut off."""
    lines = table.split("\n")
    for _ in range(odd.random.randrange(1, 5)):
        number = odd.random.randrange(len(lines))
        line = lines[number]
        at = odd.random.randrange(len(line) + 1)
        separators = [sign for sign in "=|, " if sign in line]
        if separators and odd.chance(0.6):
            sign = odd.random.choice(separators)
            words = line.split(sign)
            words[odd.random.randrange(len(words))] = str(value(odd))
            lines[number] = sign.join(words)
        else:
            lines[number] = odd.one((line[:at], line[at:], line[:at] + odd.text() + line[at:], line + line, odd.text()))
    return "\n".join(lines)


class OddRecord:
    """A record of pyslurm's whose attributes may be anything; reading one may fail as pyslurm's decoding does."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        """Return the attribute, always the same one."""
        if name == "id":
            return 7
        odd = Odd(f"{self._seed} {name}")
        if odd.chance(0.1):
            return (b"caf\xe9" + b"x" * odd.random.randrange(9)).decode()
        return odd.one((None, None, "", 0, 1, odd.count(), odd.text(), value(odd), {"gpu": odd.count()}, _Tres(odd)))


class _Tres:
    def __init__(self, odd: Odd) -> None:
        self.gres = {odd.one(("gpu", "gpu:a100", odd.text())): _Count(value(odd))}


class _Count:
    def __init__(self, count: Any) -> None:
        self.count = count
