"""Policies by name: the built-in ones, and those of distributions that are really installed."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from policy_builders import make_job, make_node, make_request

from muri.cli import cli, run_command
from muri.policies import registry
from muri.policies.options import OptionsError, PolicyOptions
from muri.policies.registry import UnknownPolicyError, describe_policies, get_policy, policy_names
from muri.policies.schedulers import MuriJct

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "policies.md"


def test_the_default_comes_first_and_nothing_is_missing():
    names = policy_names()
    assert names[0] == "auto"
    wanted = "fifo sjf srtf srsf las 2d-las tiresias tiresias-gittins themis antman muri-s muri-l muri-jct"
    assert set(wanted.split()) <= set(names)
    assert [get_policy(name).name for name in names] == list(dict.fromkeys(names))


def test_an_unknown_policy_lists_the_valid_ones():
    with pytest.raises(UnknownPolicyError, match=r"unknown policy 'tiresia' \(did you mean 'tiresias'\?\)") as caught:
        get_policy("tiresia")
    assert all(name in str(caught.value) for name in policy_names())
    assert caught.value.exit_code == 2


def test_only_what_the_user_chose_replaces_the_policys_own_defaults():
    assert MuriJct().rules == get_policy("muri-jct").rules
    plain = get_policy("muri-jct", {}).rules
    assert (plain.objective, plain.grouping, plain.speed_model) == ("jct", "optimal", "fair")
    chosen = get_policy("muri-jct", {"speed_model": "lockstep", "max_group_size": 2}).rules
    assert (chosen.objective, chosen.grouping, chosen.speed_model) == ("jct", "optimal", "lockstep")
    assert chosen.max_group_size == 2


@pytest.mark.parametrize("name", ["muri-s", "muri-l"])
def test_the_papers_policies_stay_the_papers(name):
    odd = PolicyOptions(
        grouping="optimal",
        merge="as-needed",
        objective="jct",
        speed_model="fair",
        matching="networkx",
        ordering="worst",
    )
    rules = get_policy(name, odd).rules
    assert (rules.grouping, rules.merge, rules.objective, rules.speed_model) == (
        "rounds",
        "whole-rounds",
        "efficiency",
        "lockstep",
    )
    assert (rules.matching, rules.ordering) == ("networkx", "worst")


def test_a_choice_that_contradicts_the_policy_is_refused():
    with pytest.raises(OptionsError, match="policy muri-s always has objective efficiency, not jct"):
        get_policy("muri-s", {"objective": "jct"})
    assert get_policy("muri-s", {"objective": "efficiency"}).rules.objective == "efficiency"


def test_a_limit_that_a_policy_stays_below_is_not():
    assert get_policy("fifo", {"max_group_size": 4, "preemption": True}).rules.max_group_size == 1
    assert not get_policy("fifo", {"preemption": True}).rules.preemption
    assert not get_policy("srtf", {"preemption": False}).rules.preemption


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_group_size": 5}, "max_group_size is 5; it must be 1 to 4"),
        ({"max_group_size": True}, "max_group_size is True; it must be a whole number"),
        ({"ordering": "bets"}, "ordering is 'bets'; valid are: best, worst"),
        ({"matching": "blossom"}, "valid are: certified, rustworkx, networkx, priority-order"),
        ({"max_wait_s": -1.0}, "max_wait_s is -1.0"),
        ({"max_wait_s": float("nan")}, "max_wait_s is nan"),
        ({"max_wait_s": "long"}, "max_wait_s is 'long'; it must be a number"),
        ({"min_speedup": 0.9}, "min_speedup is 0.9; it must be 1 to 4"),
        ({"min_speedup": float("nan")}, "min_speedup is nan"),
        ({"queue_limits_gpu_s": (7200.0, 3250.0)}, "must be ascending"),
        ({"queue_limits_gpu_s": (0.0,)}, "must be ascending"),
        ({"queue_limits_gpu_s": (float("inf"),)}, "must be ascending, finite"),
        ({"queue_limits_gpu_s": 5}, "queue_limits_gpu_s is 5; it must be a list of numbers"),
        ({"promote_after": 0.0}, "promote_after is 0.0"),
        ({"promote_after": float("nan")}, "promote_after is nan"),
        ({"service_history_gpu_s": (0.0,)}, "service_history_gpu_s"),
        ({"service_history_gpu_s": ("x",)}, "it must be a list of numbers"),
        ({"preemption": "abc"}, "preemption is 'abc'; it must be true or false"),
        ({"horus_queues": 0}, "horus_queues"),
        ({"horus_queues": 1.5}, "horus_queues is 1.5; it must be a whole number"),
        ({"horus_jobs_per_round": 0}, "horus_jobs_per_round"),
        ({"horus_slowdown_weight": float("nan")}, "horus_slowdown_weight"),
        ({"horus_memory_weight": 0.0, "horus_slowdown_weight": 0.0}, "both 0"),
        ({"objectiv": "jct"}, r"unknown option 'objectiv' \(did you mean 'objective'\?\)"),
    ],
)
def test_impossible_options_are_named(options, message):
    with pytest.raises(OptionsError, match=message):
        get_policy("auto", options)


def test_a_name_that_is_near_to_none_gets_no_hint():
    for name in ("nope", "xyz"):
        with pytest.raises(UnknownPolicyError, match=rf"unknown policy '{name}'; valid are"):
            get_policy(name)


def test_choosing_a_policy_loads_no_more_than_it_needs():
    """Neither the metadata of distributions nor other policies for a built-in one, and never a heavy package."""
    code = (
        "import importlib.metadata as m, sys\n"
        "original = m.entry_points\n"
        "def refuse(**wanted):\n"
        "    if wanted.get('group') == 'muri.policies': raise SystemExit('metadata was read')\n"
        "    return original(**wanted)\n"
        "m.entry_points = refuse\n"
        "from muri.policies.registry import get_policy\n"
        "get_policy('fifo')\n"
        "print('muri.policies.siblings.horus' in sys.modules)\n"
        "get_policy('auto')\n"
        "print([m for m in ('torch', 'pyslurm', 'networkx', 'rustworkx') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]


def test_every_policy_describes_itself():
    infos = {info.name: info for info in describe_policies()}
    for info in infos.values():
        assert info.order
        assert info.summary.endswith(".")
    assert [infos[name].shares for name in ("fifo", "srtf", "muri-s", "auto")] == [False, False, True, True]
    assert [infos[name].preempts for name in ("fifo", "sjf", "srtf", "muri-s")] == [False, False, True, True]
    assert [infos[name].live for name in ("auto", "pollux")] == ["yes", "no"]


def test_the_chapters_table_says_what_every_policy_says_of_itself():
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (yes|no) \| (yes|partly|no) \|$", DOC.read_text(), flags=re.MULTILINE)
    told = {name: (stops == "yes", live) for name, stops, live in rows}
    assert told == {info.name: (info.preempts, info.live) for info in describe_policies()}


@pytest.mark.parametrize("page", ["README.md", "docs/policies.md"])
def test_pages_say_of_auto_what_it_says_of_itself(page):
    (auto,) = (info for info in describe_policies() if info.name == "auto")
    text = " ".join((ROOT / page).read_text().replace("`", "").replace("|", "").split())
    assert f"auto {auto.summary[0].lower()}{auto.summary[1:-1]}" in text


def metadata_of(site, name, version="1.0", **targets):
    """Write what pip writes: a *.dist-info folder with entry points."""
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "\n".join(f"{policy} = {target}" for policy, target in targets.items())
    (folder / "entry_points.txt").write_text(f"[muri.policies]\n{lines}\n")


@pytest.fixture
def muri(monkeypatch, capsys):
    """Runs a command where the distributions of a site are installed, and returns its output."""

    def run(site, *words):
        monkeypatch.setenv("COLUMNS", "80")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(site))
            for module in ("fine", "raising", "site_policies"):
                patch.delitem(sys.modules, module, raising=False)
            code = run_command(cli, list(words))
        said = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=said.out, stderr=said.err)

    return run


def select(site, policy):
    """The command that looks at a configuration with this policy."""
    config = site / f"{policy}.yaml"
    config.write_text(f"policy: {policy}\n")
    return ["config", "check", str(config)]


def doc_blocks():
    """The fenced blocks of the chapter, by language."""
    chapter = DOC.read_text().partition("## Adding a policy")[2].partition("\n## ")[0]
    return dict(re.findall(r"```(\w+)\n(.*?)```", chapter, flags=re.DOTALL))


def as_pip_does(folder, blocks):
    """The documentation's example, installed as a site would install it."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    (source / "site_policies.py").write_text(blocks["python"])
    (source / "pyproject.toml").write_text(blocks["toml"])
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, capture_output=True, text=True)
    return site


def by_its_metadata(folder, blocks):
    """The same without pip, which takes seconds."""
    (folder / "site_policies.py").write_text(blocks["python"])
    project = tomllib.loads(blocks["toml"])["project"]
    metadata_of(folder, project["name"], project["version"], **project["entry-points"]["muri.policies"])
    return folder


@pytest.mark.parametrize("install", [by_its_metadata, pytest.param(as_pip_does, marks=pytest.mark.thorough)])
def test_the_documented_policy_can_be_installed_selected_and_listed(tmp_path, muri, install):
    blocks = doc_blocks()
    assert len(blocks["python"].splitlines()) < 100
    site = install(tmp_path, blocks)
    selected = muri(site, *select(tmp_path, "largest-first"))
    listed = muri(site, "policies", "--json")
    mistyped = muri(site, *select(tmp_path, "largest-frist"))
    assert (selected.returncode, selected.stderr) == (0, "")
    (info,) = [item for item in json.loads(listed.stdout)["policies"] if item["name"] == "largest-first"]
    assert info["source"] == "our-policies 1.0"
    assert (info["shares"], info["preempts"], info["problem"]) == (False, True, "")
    assert "largest-first" in mistyped.stderr


def test_the_documented_policy_plans_as_it_says():
    namespace = {}
    exec(doc_blocks()["python"], namespace)
    jobs = [make_job(1, gpu_count=1), make_job(2, gpu_count=4), make_job(3, gpu_count=2)]
    plan = namespace["LargestFirst"]().plan(make_request(jobs, [make_node("n1", 6, gpu_count=6)]))
    assert [solo.job_id for solo in plan.solo] == [2, 3]
    assert [item.job_id for item in plan.waiting] == [1]


BROKEN = {
    "missing": ("gone:Policy", "ModuleNotFoundError"),
    "moved": ("moved:Policy", "QueuePolicy is in muri.policies.schedulers, PriorityKey in muri.policies.types"),
    "raises": ("raising:Policy", "ZeroDivisionError"),
    "attribute": ("fine:Nothing", "AttributeError"),
    "number": ("fine:NUMBER", "it is a int"),
    "planless": ("fine:Planless", "it makes a Planless, which does not inherit muri.policies.types.Policy"),
    "unfinished": ("fine:Unfinished", "the class Unfinished has no name"),
    "optionless": ("fine:Optionless", "TypeError"),
}


@pytest.fixture
def broken(tmp_path):
    """A site with two distributions: one breaks all its policies or takes names of others, the other takes one too."""
    targets = {name: target for name, (target, _) in BROKEN.items()}
    metadata_of(tmp_path, "acme-policies", "2.1", fifo="gone:Policy", ours="fine:A", **targets)
    metadata_of(tmp_path, "other-policies", ours="fine:B")
    (tmp_path / "moved.py").write_text("from muri.policies.schedulers.base import QueuePolicy as Policy\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    (tmp_path / "fine.py").write_text(
        "from muri.policies.types import Policy\n\nNUMBER = 3\n\n"
        "class Planless:\n    def __init__(self, options): pass\n\nclass Optionless:\n    pass\n\n"
        "class Unfinished(Policy):\n    def __init__(self, options): pass\n    def plan(self, request): pass\n"
    )
    return tmp_path


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_says_which_distribution_is_to_blame(broken, muri, name):
    target, problem = BROKEN[name]
    done = muri(broken, *select(broken, name))
    assert done.returncode == 2
    assert f"policy '{name}' of acme-policies 2.1 ({target}) cannot be used: " in done.stderr
    assert problem in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_policies_hurt_nobody_else_and_are_listed_with_their_problems(broken, muri):
    assert muri(broken, *select(broken, "fifo")).returncode == 0  # a site cannot replace a built-in policy
    assert muri(broken, *select(broken, "ours")).returncode == 2
    listed = muri(broken, "policies")
    assert listed.returncode == 1
    assert "cannot be used" in listed.stdout
    assert "acme-policies 2.1 (gone:Policy)" in listed.stderr
    assert "acme-policies 2.1 offers a policy named 'fifo', which is one of Muri's own" in listed.stderr
    assert "acme-policies 2.1 and other-policies 1.0 all offer a policy named 'ours'" in listed.stderr
    assert max(map(len, listed.stdout.splitlines())) <= 80


def test_the_list_fits_eighty_columns(tmp_path, muri):
    done = muri(tmp_path, "policies")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert set(policy_names()) <= rows
    assert "LIVE no (pollux): Slurm cannot change the number of a running job's GPUs" in done.stdout
    assert "LIVE partly (sjf-bsbf, horus, horus-f, obp, pab, sjf-ffs): " in done.stdout


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("synergy-tune", "choose synergy with the option mechanism=tune (in muri.yaml below `synergy:`"),
        ("synergy-greedy-las", "choose synergy with the options mechanism=greedy and order=las"),
        ("synergy-opt-fifo", "choose synergy-opt with the option order=fifo"),
    ],
)
def test_a_removed_name_says_what_to_choose_instead(name, instead):
    with pytest.raises(UnknownPolicyError) as caught:
        get_policy(name)
    assert f"policy name '{name}' was removed in 0.3: {instead}" in str(caught.value)


def test_without_the_lab_its_policies_say_where_they_are(monkeypatch):
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    with pytest.raises(UnknownPolicyError, match=r"policy 'drf' is in Muri's lab: pip install ./lab"):
        get_policy("drf")
    core = set(policy_names())
    monkeypatch.undo()
    assert core | set(registry._IN_THE_LAB) == set(policy_names())
