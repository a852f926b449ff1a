"""The site that `make docs` builds: these pages, and the public Python API from its docstrings."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Muri"
author = "The Muri authors"
version = release = _PROJECT["version"]
html_title = f"Muri {version}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4

suppress_warnings = ["misc.highlighting_failure"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
exclude_patterns = ["papers/*"]

html_theme = "furo"
html_copy_source = False
html_show_copyright = False
