"""A group in the words of a command line, for tests that start its runtime."""

import json
from collections.abc import Sequence
from typing import Any

from muri.group_spec import group_of

_OF_THE_GROUP = {"--discipline": "discipline", "--hang-timeout-s": "hang_timeout_s"}
_OF_MEMBERS = {
    "--solo-iteration-s": "solo_iteration_s", "--predicted-speed": "predicted_speed", "--gpu-mem-gib": "gpu_mem_gib",
    "--accumulate-steps": "accumulate_steps", "--isolation": "isolation", "--min-speed": "min_speed",
}  # fmt: skip


def runtime_words(members: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The runtime's options, the group as its JSON: `--isolation 101=thread` is of 101, without `101=` of all."""
    group: dict[str, Any] = {"members": {member: {"job_id": member} for member in members}}
    rest: list[str] = []
    words = iter(options)
    for word in words:
        if word in _OF_THE_GROUP:
            group[_OF_THE_GROUP[word]] = _plain(next(words))
        elif word == "--ordering":
            group["ordering"] = [None if entry == "-" else entry for entry in next(words).split(",")]
        elif word in _OF_MEMBERS:
            for entry in next(words).split(","):
                member, _, figure = entry.rpartition("=")
                for each in [member] if member else members:
                    group["members"][each][_OF_MEMBERS[word]] = _plain(figure)
        else:
            rest.append(word)
    spec = group_of(group | {"members": list(group["members"].values())})
    return ["--group", spec.to_text(), *rest]


def _plain(text: str) -> Any:
    """A word as JSON would have it: a number, or itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
