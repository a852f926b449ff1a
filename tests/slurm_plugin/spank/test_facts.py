"""What the plugin reads in its command line, and tells of a submission through job_submit to the controller."""

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lupa.lua51 import LuaRuntime
from option_sources import JOB_SUBMIT_SOURCE, SPANK_SOURCE

from muri.slurm_plugin.records.comment_tags import SubmitFacts, decode_words, encode_words, read_facts

Word = str | bytes
Tell = Callable[..., str]

SBATCH = ["sbatch", "--muri", "--gres=gpu:1"]
SCRIPT = len(SBATCH)
PLAIN = {"PATH": "/usr/bin:/bin"}

arguments = st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\0", b"")), max_size=8)


@pytest.fixture(scope="session")
def tell(program: Path) -> Tell:
    """The plugin's reader of command lines."""

    def run(words: Sequence[Word], script: int = SCRIPT, environment: dict[str, str] = PLAIN, cwd: str = "/") -> str:
        done = subprocess.run(
            [program, "facts", str(script), *words], env=environment, cwd=cwd, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode("ascii").strip()

    return run


def facts_of(text: str) -> SubmitFacts:
    found = read_facts(f"muri:on muri-facts:{text} muri-gate:licence")
    assert found is not None, text
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(arguments)
@example([b"two words", b"", b"'", b'"', b"\\", b"a\nb\r\n", b"$(id)`id`", b"\xff\xfe", b"caf\xe9", b"-x", b"\t *?"])
def test_every_argument_arrives_as_it_was_given(tell: Tell, given_words: list[bytes]) -> None:
    text = tell([*SBATCH, "train.sh", *given_words])
    lua = LuaRuntime()
    module = lua.execute((JOB_SUBMIT_SOURCE / "muri.lua").read_text(encoding="utf-8"))
    kept = module.facts(lua.table_from({0: f"MURI_FACTS={text}"}), lua.table_from({"PATH": "/bin"}))
    assert kept == text
    assert not set(kept) - set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.~")
    found = facts_of(kept).arguments
    assert found is not None
    assert [word.encode(errors="surrogateescape") for word in found] == given_words
    assert decode_words(encode_words(found)) == found


@pytest.mark.parametrize(
    ("words", "script", "expected"),
    [
        (["sbatch", "--wrap=x"], 2, ()),
        (["sbatch"], 1, ()),
        (["sbatch", "-n", "1", "train.sh"], 3, ()),
        (["sbatch", "train.sh", "--muri"], 1, ("--muri",)),
    ],
)
def test_what_follows_the_script_is_its_own(tell: Tell, words: list[str], script: int, expected: tuple[str]) -> None:
    assert facts_of(tell(words, script)).arguments == expected


@pytest.mark.parametrize("script", [-1, 0, 4, 10**6])
def test_a_place_that_makes_no_sense_tells_nothing(tell: Tell, script: int) -> None:
    assert tell(["sbatch", "train.sh", "7"], script) == "none"


def test_arguments_that_do_not_fit_are_told_by_their_digest_alone(tell: Tell) -> None:
    first, second = (facts_of(tell([*SBATCH, "train.sh", letter * 4000])) for letter in "ab")
    assert first.arguments is second.arguments is None
    assert first.line != second.line
    largest = tell([*SBATCH, "train.sh", "x" * 2900])
    assert len(largest) <= 4096
    assert facts_of(largest).arguments == ("x" * 2900,)


def test_lines_that_differ_have_other_digests_and_equal_ones_do_not(tell: Tell) -> None:
    lines = [["a b"], ["a", "b"], ["a b", ""], []]
    digests = [facts_of(tell([*SBATCH, "train.sh", *line])).line for line in lines]
    assert len(set(digests)) == len(lines)
    assert digests[0] == facts_of(tell(["/usr/bin/sbatch", *SBATCH[1:], "train.sh", "a b"])).line


def python_in(folder: Path, name: str = "python3") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return program


def test_the_python_is_the_first_in_path(tell: Tell, tmp_path: Path) -> None:
    first, second = python_in(tmp_path / "a"), python_in(tmp_path / "b", "python")
    (tmp_path / "a" / "sub" / "python3").mkdir(parents=True)  # a directory is not a program
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "python3").write_text("not executable")
    (tmp_path / "link").symlink_to(tmp_path / "a")

    def found(path: str, cwd: Path = tmp_path) -> str:
        return facts_of(tell([*SBATCH, "x"], environment={"PATH": path}, cwd=str(cwd))).python

    assert found(f"{tmp_path}/none:{tmp_path}/c:{tmp_path}/a/sub:{tmp_path}/a:{tmp_path}/b") == str(first)
    assert found(f"{tmp_path}/b:{tmp_path}/a") == str(first)  # python3 goes before python
    assert found(f"{tmp_path}/b") == str(second)
    assert found(f"{tmp_path}/link") == str(first)
    assert found(":/nowhere", tmp_path / "a") == str(first)  # an empty entry is the working directory
    assert found("a") == str(first)
    assert found("/nowhere") == found("") == ""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python3").symlink_to(first)
    assert found(f"{tmp_path}/venv") == f"{tmp_path}/venv/python3"  # a virtual environment's is not its base's


def test_the_environment_is_told_by_what_decides_imports(tell: Tell, tmp_path: Path) -> None:
    python_in(tmp_path)

    def digest(*options: str, **variables: str) -> str:
        words = ["sbatch", *options, "x"]
        environment = {"PATH": f"{tmp_path}:/bin", **variables}
        return facts_of(tell(words, len(words) - 1, environment=environment)).environment

    plain = digest()
    assert digest(HOME="/home/alice", TERM="xterm") == digest("--time=5") == plain
    assert digest(PATH=f"{tmp_path}:/usr/bin") == plain  # the same Python
    deciding = [digest(**{name: "/x"}) for name in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH")]
    exports = [digest("--export=ALL,A=1"), digest(SBATCH_EXPORT="A")]
    exports += [digest("--export", value) for value in ("A=2", "A=3")]
    assert len({plain, digest(PATH="/nowhere"), *deciding, *exports}) == 2 + len(deciding) + len(exports)


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "2.0123456789abcdef.0123456789abcdef..", "1.0123456789abcdef.0123456789abcde..",
        "1.0123456789abcdeg.0123456789abcdef..", "1.0123456789abcdef.0123456789abcdef...",
        "1.0123456789abcdef.0123456789abcdef..Y", "1.0123456789abcdef.0123456789abcdef.L3.YQ",
        "1.0123456789abcdef.0123456789abcdef..~~", "1.0123456789abcdef.0123456789abcdef..YQA=",
    ],
)  # fmt: skip
def test_a_damaged_word_is_no_fact(text: str) -> None:
    found = read_facts(f"muri:on muri-facts:{text}")
    assert found is None or found.python == ""


@given(st.text())
def test_no_comment_makes_reading_fail(comment: str) -> None:
    read_facts(comment)
    read_facts(f"muri-facts:{comment}")
    read_facts(f"muri-facts:1.0123456789abcdef.0123456789abcdef.{comment}.{comment}")


def test_a_path_with_control_characters_is_not_taken() -> None:
    path = encode_words(["/home/a\nb"])[:-2]
    assert facts_of(f"1.0123456789abcdef.0123456789abcdef.{path}.").python == ""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("origin") / "origin.so"
    source = SPANK_SOURCE / "facts.c"
    subprocess.run(["cc", "-std=c11", "-shared", "-fPIC", "-o", target, source], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.muri_argument_is.restype = ctypes.c_bool
    loaded.muri_argument_is.argtypes = [
        ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p,
    ]  # fmt: skip
    return loaded


def ask(library: ctypes.CDLL, command: list[str], index: int, name: str, value: str | None) -> bool:
    text = b"".join(argument.encode() + b"\0" for argument in command)
    wanted = None if value is None else value.encode()
    return bool(library.muri_argument_is(text, len(text), index, name.encode(), wanted))


COMMAND = ["sbatch", "--muri=model=a", "--no-muri", "--muri", "--mur=alone", "-N1", "a.sh", "--muri=model=a"]


@pytest.mark.parametrize(
    ("index", "name", "value", "answer"),
    [
        (1, "muri", "model=a", True),
        (1, "muri", "model=b", False),
        (1, "no-muri", None, False),
        (2, "no-muri", None, True),
        (3, "muri", None, True),
        (4, "muri", "alone", True),
        (0, "muri", None, False),
        (8, "muri", None, False),
        (-1, "muri", None, False),
    ],
)
def test_argument_is(library: ctypes.CDLL, index: int, name: str, value: str | None, answer: bool) -> None:
    assert ask(library, COMMAND, index, name, value) is answer


def test_a_command_line_cut_short_is_not_read_beyond_its_end(library: ctypes.CDLL) -> None:
    assert library.muri_argument_is(b"sbatch\0--muri", 13, 1, b"muri", None) is False
    assert library.muri_argument_is(b"", 0, 0, b"muri", None) is False
