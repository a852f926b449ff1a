"""What the sandbox mounts from the host: its Python, the virtual environment, pip's configuration."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sandbox.init import Bind
from sandbox.support import CHECKOUT, Progress, SandboxError, cache_dir, locked_directory

#: Debian's Python modules, where packages for any Python 3 put theirs.
DIST_PACKAGES = Path("/usr/lib/python3/dist-packages")
_CERTIFICATE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_CERTIFICATE_PLACES = ("/usr/share/ca-certificates", "/usr/local/share/ca-certificates")


def require_root() -> None:
    """Refuse to run without root, which namespaces, mounts and users of a Slurm cluster need."""
    if os.geteuid() != 0:
        raise SandboxError("muri-sandbox needs root for its namespaces and mounts: run it with sudo")


def require_tools(packages: dict[str, str]) -> None:
    """Make sure commands exist, installing the Debian package that holds a missing one."""
    if not _packages_missing(packages):
        return
    if not shutil.which("apt-get"):
        raise SandboxError(f"install {', '.join(_packages_missing(packages))} first: this system has no apt-get")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with locked_directory(cache_dir() / "apt.lock", Progress(), "another process that installs packages"):
        missing = _packages_missing(packages)
        if not missing:
            return
        for arguments in (["update", "-qq"], ["install", "-y", "-qq", *missing]):
            done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxError(f"apt-get could not install {', '.join(missing)}: {done.stderr.strip()}")


def _packages_missing(packages: dict[str, str]) -> list[str]:
    return sorted({package for tool, package in packages.items() if not shutil.which(tool)})


def python_tag() -> str:
    """Name the running Python's binary interface, such as cpython-311-x86_64-linux-gnu."""
    return str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag)


def python_executable() -> Path:
    """Return the host's Python itself, not a virtual environment's link to it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.base_prefix, "bin", version)


def _python_prefixes() -> set[Path]:
    prefixes = {Path(sys.base_prefix)}
    for configuration in (CHECKOUT / ".venv/pyvenv.cfg", *cache_dir().glob("venv-*/pyvenv.cfg")):
        if not configuration.is_file():
            continue
        for line in configuration.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "home":
                prefixes.add(Path(value.strip()).resolve().parent)
    return prefixes


def _system_python_paths() -> list[Path]:
    """Return the files of a Python that shares /usr with everything else."""
    names = [f"python{sys.version_info.major}.{sys.version_info.minor}"]
    found = [DIST_PACKAGES]
    for name in names:
        found += [Path("/usr/bin", name), Path("/usr/lib", name), Path("/usr/include", name)]
        found += Path("/usr/include").glob(f"*/{name}")
        found += Path("/usr/lib").glob(f"*/lib{name}*.so*")
    return [path for path in found if path.exists()]


def python_binds() -> list[Bind]:
    """Mount the host's Python, and that of the virtual environments, under the same paths."""
    paths: set[Path] = set()
    for prefix in _python_prefixes():
        paths.update(_system_python_paths() if prefix == Path("/usr") else [prefix])
    return [Bind(str(path), str(path)) for path in sorted(paths)]


def project_binds() -> list[Bind]:
    """Mount the checkout, writable for root, and the cached environments, read-only."""
    checkout, cache = str(CHECKOUT), str(cache_dir())
    return [Bind(cache, cache), Bind(checkout, checkout, read_only=False)]


def _pip_settings() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        settings[key] = value.strip("'\"")
    return settings


def _local_paths(value: str) -> list[Path]:
    """Return the paths in a pip setting: words that are absolute paths or file: addresses."""
    paths = []
    for word in value.replace("\\n", " ").split():
        # The pages of a local index point to files beside the index, so its parent is served.
        path = Path(unquote(urlsplit(word).path)).parent if word.startswith("file:") else Path(word)
        if path.is_absolute() and path != Path("/") and path.exists():
            paths.append(path)
    return paths


def pip_binds() -> list[Bind]:
    """Mount what pip needs of the host: configuration, certificates, local package folders."""
    paths = {Path("/etc/resolv.conf"), Path("/etc/hosts"), Path("/etc/pip.conf"), Path("/etc/xdg/pip")}
    paths |= {Path.home() / ".config/pip", Path.home() / ".pip"}
    paths |= {Path(place) for place in _CERTIFICATE_PLACES}
    values = list(_pip_settings().values())
    values += [value for name, value in os.environ.items() if name.startswith("PIP_")]
    values += [os.environ.get(name, "") for name in _CERTIFICATE_VARIABLES]
    for value in values:
        paths.update(_local_paths(value))
    return [Bind(os.path.realpath(path), str(path)) for path in sorted(paths) if path.exists()]


def apt_binds() -> list[Bind]:
    """Mount how the host's apt reaches its mirror: proxies and certificates."""
    places = ("/etc/apt/apt.conf.d", "/etc/apt/auth.conf.d")
    return [Bind(place, place) for place in places if Path(place).is_dir()]


def pip_environment() -> dict[str, str]:
    """Return the host's variables that pip should see inside."""
    names = {*_CERTIFICATE_VARIABLES, *_PROXY_VARIABLES}
    return {name: value for name, value in os.environ.items() if name in names or name.startswith("PIP_")}
