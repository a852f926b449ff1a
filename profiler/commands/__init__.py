"""The commands `muri profile …`: their table, from which each is imported only when it is called."""

from typing import Final

import click

from muri.commands import LazyCommand, LazyGroup

_HERE: Final = "muri.profiler.commands"

VERBS: Final = {
    "list": LazyCommand(f"{_HERE}.stored:list_command", "List profiles, sorted and filtered."),
    "show": LazyCommand(f"{_HERE}.stored:show_command", "Show a profile with its stages as bars."),
    "run": LazyCommand(f"{_HERE}.measure:run_command", "Measure a script in a dry run and store its profile."),
    "set": LazyCommand(f"{_HERE}.stored:set_command", "Correct a profile's figures by hand."),
    "rm": LazyCommand(f"{_HERE}.stored:rm_command", "Remove a profile; its model is measured again."),
    "publish": LazyCommand(
        f"{_HERE}.publish:publish_command", "Make users' profiles valid for all users, or take them back."
    ),
    "export": LazyCommand(f"{_HERE}.stored:export_command", "Print all profiles as JSON."),
    "import": LazyCommand(f"{_HERE}.stored:import_command", "Read profiles from a JSON export."),
}


@click.group(cls=LazyGroup, table=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
def profile() -> None:
    """List, show, move and remove stage profiles.

    A profile says how long one training iteration of a model holds storage, CPU, GPU and
    network. It is measured once, while the first job trains or in a dry run of a few seconds, and reused for every
    later job with the same model, batch size, GPU count and GPU type of its user or, once an administrator has
    published it, of all users.

    \b
    Examples:
      muri profile list
      muri profile show resnet18 --batch-size 64
      muri profile export > profiles.json
      muri profile rm resnet18 --all-matching --yes
    """
