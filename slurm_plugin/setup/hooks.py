"""What loads Muri's plugin and Lua module: plugstack.conf and job_submit.lua, completed. Pure: texts in, texts out."""

import re
from collections.abc import Iterable
from typing import Final

from muri.slurm_plugin.setup.marks import with_block

FRAGMENT: Final = "/usr/lib/muri/plugstack.conf"
"""In the package muri-spank; where it has been removed, Slurm passes over the line that includes it."""

LUA_MODULE: Final = "/usr/share/muri/job_submit/job_submit.lua"
"""In the package muri-controller; where it has been removed, the lines that load it do nothing."""

LOAD: Final = (
    "do",
    f'  local muri = loadfile("{LUA_MODULE}")',
    "  if muri then",
    "    pcall(muri)",
    "  end",
    "end",
)
_COMMENT: Final = re.compile(r"(?m)^\s*(#|--).*$")
_LAST_RETURN: Final = re.compile(r"^return\b[^\n]*\n?(?:[ \t]*(?:--(?!\[\[)[^\n]*)?(?:\n|\Z))*\Z", re.MULTILINE)


def with_plugstack(text: str | None, all_texts: Iterable[str]) -> str | None:
    """Return plugstack.conf with Muri's plugin.

    Args:
        text: The file; None where there is none.
        all_texts: It and all files that it includes.
    """
    if any("muri_spank.so" in _COMMENT.sub("", each) or FRAGMENT in _COMMENT.sub("", each) for each in all_texts):
        return text
    return with_block(text, [f"include {FRAGMENT}"])


def with_job_submit(text: str | None) -> str:
    """Return job_submit.lua with Muri's part behind the site's own functions, whose rules run first."""
    if text is None:
        return with_block(None, [*LOAD, "return slurm.SUCCESS"], "--")
    code = _COMMENT.sub("", text)
    if LUA_MODULE in code or re.search(r"""require\s*\(?\s*["']muri["']""", code):
        return text
    found = _LAST_RETURN.search(text)
    return with_block(text, LOAD, "--", found.start() if found else None)
