"""Muri for a Python in which it is not installed: PYTHONPATH names the directory above, which holds nothing else.

This file becomes the package `muri` beside which it lies, wherever that was installed or checked out. So the other
Python sees Muri, and none of the packages that Muri's own environment holds.
"""

from __future__ import annotations

from pathlib import Path

_package = Path(__file__).resolve().parents[2]
__file__ = str(_package / "__init__.py")
# In a checkout the rooms (launcher, profiler, …) lie beside the package, installed they lie in it.
__path__ = [str(_package), *([] if (_package / "launcher").is_dir() else [str(_package.parent)])]
exec(compile(Path(__file__).read_bytes(), __file__, "exec"))
