"""Put one deliberate bug after another into a copy of the product, and run the test that must find it.

The lists are `tests/mutations/ROOM.yaml`. An entry names the bug, the file, the text that it replaces (which stands
there exactly once), the text that takes its place, and a test, which passes without the bug and fails with it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Final

import click
import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
LISTS: Final = ROOT / "tests" / "mutations"

_KEYS: Final = {"bug", "file", "from", "to", "test"}

_LONGEST_S: Final = 300.0
"""A test that takes longer has not found a bug; without one it takes seconds."""

_DEADLINE_S: Final = 60
"""Of a wait in a test that is to fail."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A deliberate bug.

    Attributes:
        room: The list that it stands in.
        bug: What the product does wrong with it.
        file: Where it is put in, relative to the checkout.
        before: The text that it replaces.
        after: The new text there.
        test: The test that must find it, as pytest names tests.
    """

    room: str
    bug: str
    file: str
    before: str
    after: str
    test: str


def listed(rooms: Sequence[str]) -> list[Mutation]:
    """Read the lists of some rooms, or of all if none is named.

    Raises:
        click.ClickException: An entry does not fit the product any more.
    """
    known = sorted(path.stem for path in LISTS.glob("*.yaml"))
    if unknown := set(rooms) - set(known):
        raise click.ClickException(f"no list {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found = []
    for room in rooms or known:
        for entry in yaml.safe_load((LISTS / f"{room}.yaml").read_text()):
            if set(entry) != _KEYS:
                raise click.ClickException(f"{room}: an entry has the keys {sorted(_KEYS)}, not {sorted(entry)}")
            mutation = Mutation(room, entry["bug"], entry["file"], entry["from"], entry["to"], entry["test"])
            _check(mutation)
            found.append(mutation)
    return found


def _check(mutation: Mutation) -> None:
    where = f"{mutation.room}: {mutation.bug}"
    for path in (mutation.file, mutation.test.partition("::")[0]):
        if not (ROOT / path).is_file():
            raise click.ClickException(f"{where}: there is no {path}")
    count = (ROOT / mutation.file).read_text().count(mutation.before)
    if count != 1 or mutation.before == mutation.after:
        raise click.ClickException(f"{where}: its text stands {count} times in {mutation.file}, or stays the same")


class Copy:
    """A copy of the checkout with an environment of its own, to put bugs into."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Python tells a changed module from its compiled one by a time in whole seconds.
        self._written_s = int(time.time())
        command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        subprocess.run(["scripts/make-venv"], cwd=folder, check=True, stderr=subprocess.DEVNULL)

    def run(self, tests: Sequence[str], **variables: str) -> tuple[int, str]:
        """Run tests, with these variables of the environment.

        Returns:
            pytest's exit code, -1 if the tests took too long; and its output.
        """
        command = [".venv/bin/python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self._folder,
                env=os.environ | variables,
                check=False,
                timeout=_LONGEST_S,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired:
            return -1, f"took over {_LONGEST_S:.0f} s"
        return done.returncode, done.stdout

    @contextmanager
    def with_bug(self, mutation: Mutation) -> Iterator[None]:
        """Put a bug in for a while."""
        path = self._folder / mutation.file
        text = path.read_text()
        self._write(path, text.replace(mutation.before, mutation.after))
        try:
            yield
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        self._written_s += 1
        os.utime(path, (self._written_s, self._written_s))


def _find(mutation: Mutation, copies: SimpleQueue[Copy]) -> bool:
    copy = copies.get()
    began_s = time.monotonic()
    try:
        with copy.with_bug(mutation):
            code, printed = copy.run([mutation.test], MURI_DEADLINE_S=str(_DEADLINE_S))
    finally:
        copies.put(copy)
    word = "found" if code == 1 else "NOT FOUND" if code == 0 else f"NO ANSWER ({code})"
    click.echo(f"{word:9} {time.monotonic() - began_s:5.1f} s  {mutation.room}: {mutation.bug}\n{'':19}{mutation.test}")
    if code not in (0, 1):
        click.echo(printed)
    return code == 1


@click.command(help=__doc__)
@click.option("--room", "rooms", multiple=True, help="Only this room's list; may be given several times.")
@click.option("--jobs", default=2, show_default=True, type=click.IntRange(1), help="Copies to work on at once.")
@click.option("--list", "only_lists", is_flag=True, help="Check that the entries fit the product, and print them.")
def main(rooms: tuple[str, ...], jobs: int, only_lists: bool) -> None:
    """Run the command."""
    mutations = listed(rooms)
    if only_lists:
        for mutation in mutations:
            click.echo(f"{mutation.room}: {mutation.bug}\n    {mutation.file}\n    {mutation.test}")
        click.echo(f"{len(mutations)} bugs")
        return
    with tempfile.TemporaryDirectory(prefix="muri-mutations-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            (Path(folder) / str(number)).mkdir()
            copies.put(Copy(Path(folder) / str(number)))
        whole = copies.get()
        code, printed = whole.run(sorted({mutation.test for mutation in mutations}))
        copies.put(whole)
        if code:
            raise click.ClickException(f"without any bug the tests fail:\n{printed}")
        with ThreadPoolExecutor(jobs) as pool:
            found = list(pool.map(lambda mutation: _find(mutation, copies), mutations))
    click.echo(f"{sum(found)} of {len(found)} bugs found")
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
