"""Every link, file and module that the documentation names exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for page in ROOT.glob(pattern))
ROOMS = "lab|bin|docs|etc|examples|launcher|muri|policies|profiler|sandbox|scripts|simulator|slurm_plugin|tests"
LINK = re.compile(r"\]\(([^)#\s]*)#?([^)\s]*)\)")
FILE = re.compile(rf"(?<![\w/.~$-])(?:{ROOMS})/[\w./-]*\w|`([\w.-]+(?:/[\w.-]+)+\.(?:py|c|lua|yaml|md))`")
MODULE = re.compile(r"(?<![\w/:])muri(?:\.[a-zA-Z_]+)+")
# Files of a site, a unit, the Lua module and a group of entry points.
NO_MODULES = {"muri.yaml", "muri.mount", "muri.lua", "muri.submit", "muri.modify", "muri.gate"}


def fragments(page):
    """Return what links to a page's headings may put after the #, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_defined(dotted):
    """Return whether a dotted name is a package, a module, or a word of the module that its first part names."""
    names = dotted.split(".")[1:]
    place = ROOT if (ROOT / names[0]).is_dir() else ROOT / "muri"
    while names and (place / names[0] / "__init__.py").is_file():
        place /= names.pop(0)
    named_module = bool(names) and (place / f"{names[0]}.py").is_file()
    text = (place / (f"{names.pop(0)}.py" if named_module else "__init__.py")).read_text()
    return all(re.search(rf"\b{name}\b", text) for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text()
    missing = []
    for target, fragment in LINK.findall(text):
        if ":" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (fragment and fragment not in fragments(file)):
            missing.append(f"link {target}#{fragment}")
    files = {match[0].strip("`") for match in FILE.finditer(text)}
    missing += [f"file {name}" for name in sorted(files) if not (ROOT / name).exists()]
    modules = set(MODULE.findall(text)) - NO_MODULES
    missing += [f"module {name}" for name in sorted(modules) if not is_defined(name)]
    assert not missing
