"""`muri completion`: the script that teaches a shell the commands, options and models."""

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_MURI_COMPLETE"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL: commands, options, and models from the profile store.

    \b
    Examples:
      eval "$(muri completion bash)"                                  # now
      echo 'eval "$(muri completion bash)"' >> ~/.bashrc              # always
      echo 'eval "$(muri completion zsh)"' >> ~/.zshrc
      muri completion fish > ~/.config/fish/completions/muri.fish
    """
    found = get_completion_class(shell)
    if found is None:
        raise AssertionError(f"click does not know {shell}")
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "muri", _VARIABLE).source())
