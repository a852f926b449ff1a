"""Builds what of the SPANK plugin needs no Slurm, and reads options as a submission does: C collects, Lua reads."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from endings import JobCgroup, job_cgroup, refusal
from lupa.lua51 import LuaRuntime
from option_sources import JOB_SUBMIT_SOURCE, SPANK_SOURCE, Outcome


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Build a program of this folder with some of the plugin's files."""

    def make(main: str, *parts: str, define: str = "MURI_TRY") -> Path:
        target = tmp_path_factory.mktemp("spank-build") / main
        sources = [*(SPANK_SOURCE / f"{part}.c" for part in parts), Path(__file__).with_name(f"{main}.c")]
        # The sanitizers turn a read or write out of bounds into a failed test.
        flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_POSIX_C_SOURCE=200809L"]
        flags += ["-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wformat=2", "-I", SPANK_SOURCE]
        flags += [f"-D{define}"]
        built = subprocess.run(["cc", "-std=c11", *flags, "-o", target, *sources], capture_output=True, check=False)
        assert built.returncode == 0, built.stderr
        return target

    return make


@pytest.fixture(scope="session")
def program(build: Callable[..., Path]) -> Path:
    """A program that shows what sbatch would send."""
    return build("try_main", "options", "facts")


@pytest.fixture(scope="session")
def try_end(build: Callable[..., Path]) -> Path:
    """A program that ends jobs without Slurm."""
    return build("try_end", "node", "processes", "grant", "devices", "end")


@pytest.fixture(params=["v1", "v2"])
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JobCgroup]:
    """A job's cgroup of each version."""
    if why := refusal(request.param):
        pytest.skip(why)
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    with job_cgroup(request.param, tmp_path) as group:
        yield group


@pytest.fixture(scope="session")
def lua() -> Any:
    """The module that job_submit loads."""
    runtime = LuaRuntime(unpack_returned_tuples=True)
    return runtime.execute((JOB_SUBMIT_SOURCE / "muri.lua").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def collected(program: Path) -> Callable[..., Outcome]:
    """Collect `layer:option` arguments; the mark is that of a step."""

    def feed(*arguments: str) -> Outcome:
        command = [program, "options", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 2), done.stderr
        if done.returncode == 2:
            return Outcome(None, done.stderr)
        texts, *mark = done.stdout.split()
        return Outcome(mark[0] if mark else None, "", texts)

    return feed


@pytest.fixture(scope="session")
def options(collected: Callable[..., Outcome], lua: Any) -> Callable[..., Outcome]:
    """Collect `layer:option` arguments and read them; the mark is that of a job."""

    def feed(*arguments: str) -> Outcome:
        sent = collected(*arguments)
        if sent.error or sent.texts == "none":
            return sent if sent.error else Outcome("none", "")
        read = lua.parse(sent.texts)
        if isinstance(read, str):
            return Outcome(read, "", sent.texts)
        _, complaint, listed, _ = read
        keys = [f"  {key.form}: {key.help}" for key in lua.KEYS.values()] if listed else []
        return Outcome(None, "\n".join([complaint, *keys]), sent.texts)

    return feed
