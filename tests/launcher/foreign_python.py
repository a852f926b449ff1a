"""A Python of a user's own: a virtual environment with PyTorch, without Muri and without what Muri is made with."""

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

_PARTS_OF_TORCH = (
    "torch", "torchgen", "functorch", "numpy", "numpy.libs", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "filelock", "fsspec", "typing_extensions.py",
)  # fmt: skip

_FOREIGN = ("muri", "click", "pydantic", "rich", "yaml", "psutil", "ClusterShell")


def make_foreign_python(folder: Path) -> Path:
    """Make the environment in a folder; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python3"
    packages = Path(str(distribution("torch").locate_file("")))
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    for name in _PARTS_OF_TORCH:
        if (packages / name).exists():
            (Path(own) / name).symlink_to(packages / name)
    lacks = "; ".join(f"assert find_spec({name!r}) is None, {name!r}" for name in _FOREIGN)
    subprocess.run([python, "-c", f"from importlib.util import find_spec; {lacks}; import torch"], check=True, cwd="/")
    return python
