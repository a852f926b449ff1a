"""Edits of Slurm's files: what is added, what stays, and that all of it comes out again byte for byte."""

from pathlib import Path

import lupa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muri.slurm_plugin.setup import hooks
from muri.slurm_plugin.setup.marks import is_marked, without_marks
from muri.slurm_plugin.setup.site import Site, added, missing, replace_files
from muri.slurm_plugin.setup.slurm_conf import SetupError, read, with_gres_conf, with_slurm_conf

CONF = Path("/etc/slurm/slurm.conf")
NODES = Path("/etc/slurm/nodes.conf")
GRES = Path("/etc/slurm/gres.conf")

SITE = """\
ClusterName=site
GresTypes=gpu # by the vendor
licenses = matlab:2
JobSubmitPlugins=all_partitions
NodeName=n[1-2] CPUs=16 \\
  Gres=gpu:tesla:2 \\
  State=UNKNOWN
NodeName=login CPUs=4
PartitionName=gpu Nodes=n[1-2]
"""


def conf(text, **options):
    return with_slurm_conf({CONF: text}, with_licence=options.get("with_licence", True))[CONF]


def test_words_are_added_to_lines_that_stand_once():
    after = conf(SITE)
    assert "GresTypes=gpu,muri # by the vendor\n" in after
    assert "licenses = matlab:2,muri_gate:1000000\n" in after
    assert "JobSubmitPlugins=all_partitions,lua\n" in after
    assert '# muri setup added ",muri:64" to line 2 below this one\nNodeName=n[1-2] CPUs=16 \\\n' in after
    assert "  Gres=gpu:tesla:2,muri:64 \\\n" in after
    assert "begin muri" not in after
    assert conf(after) == after
    assert without_marks(after) == SITE


def test_lines_that_are_missing_stand_in_a_block():
    before = "NodeName=n1 Gres=gpu:1"
    after = conf(before)
    block = after[after.index("# begin muri") :]
    assert [line for line in block.splitlines() if not line.startswith("#")] == [
        "GresTypes=muri", "JobSubmitPlugins=lua", "Licenses=muri_gate:1000000",
    ]  # fmt: skip
    assert conf(after) == after
    assert without_marks(after) == before


def test_slurm_takes_the_last_of_two_lines_and_knows_quotes_and_comments():
    after = conf('GresTypes="gpu"\nLicenses=a:1\nLicenses=b:1\n#NodeName=old Gres=gpu:1\nNodeName=n1 Gres="gpu:1"\n')
    assert "Licenses=a:1\n" in after
    assert "Licenses=b:1,muri_gate:1000000\n" in after
    assert 'GresTypes="gpu,muri"' in after
    assert 'Gres="gpu:1,muri:64"' in after
    assert "#NodeName=old Gres=gpu:1\n" in after


def test_nodes_may_stand_in_an_included_file_and_have_defaults():
    texts = {CONF: "GresTypes=gpu\n", NODES: "NodeName=DEFAULT Gres=gpu:4\nNodeName=n1\nNodeName=n[2-3]\n"}
    after = with_slurm_conf(texts, with_licence=True)
    assert "NodeName=DEFAULT Gres=gpu:4,muri:64\n" in after[NODES]
    assert read(after).gpu_nodes == ("n1", "n[2-3]")
    gres = with_gres_conf({}, GRES, read(after).gpu_nodes)[GRES]
    assert "NodeName=n1,n[2-3] Name=muri Count=64 Flags=CountOnly\n" in gres
    assert with_gres_conf({GRES: gres}, GRES, ("n1",))[GRES] == gres
    assert without_marks(gres) is None


def test_a_cluster_without_gpus_is_refused():
    with pytest.raises(SetupError, match="no NodeName line"):
        conf("NodeName=n1 CPUs=4\n")


def test_what_the_site_changes_later_stays():
    later = conf(SITE).replace("CPUs=16", "CPUs=32").replace("matlab:2,", "matlab:3,") + "MaxJobCount=9\n"
    assert (
        without_marks(later) == SITE.replace("CPUs=16", "CPUs=32").replace("matlab:2", "matlab:3") + "MaxJobCount=9\n"
    )


@given(
    st.lists(
        st.sampled_from(
            ["GresTypes=gpu", "NodeName=a Gres=gpu:1 \\\n CPUs=2", "NodeName=DEFAULT Gres=gpu:2,nic:1", "# x \\",
             "Licenses=m@s:3", "JobSubmitPlugins=lua", "NodeName=b", "", "Include other.conf", "PartitionName=p"]
        )
    ),
    st.booleans(),
)  # fmt: skip
def test_any_file_comes_back_byte_for_byte(lines, has_end):
    before = "\n".join(["NodeName=z Gres=gpu:1", *lines]) + "\n" * has_end
    after = conf(before)
    assert conf(after) == after
    assert without_marks(after) == before


LUA = """\
function slurm_job_submit(d, p, u)
  if u == 7 then
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(d, r, p, u) return slurm.SUCCESS end
{end_}"""


def compiles(text: str) -> bool:
    return lupa.LuaRuntime().eval("function(text) return load(text) ~= nil end")(text)


@pytest.mark.parametrize(
    "end_", ["return slurm.SUCCESS\n", "return slurm.SUCCESS", "return 0 -- done\n\n-- the end\n", ""]
)
def test_muris_part_stands_before_the_last_return(end_):
    before = LUA.format(end_=end_)
    after = hooks.with_job_submit(before)
    assert after.index("begin muri") > after.index("slurm_job_modify")
    assert compiles(after)
    assert hooks.with_job_submit(after) == after
    assert without_marks(after) == before


def test_a_missing_job_submit_is_made_and_goes_again():
    made = hooks.with_job_submit(None)
    assert compiles(made)
    assert without_marks(made) is None
    assert hooks.with_job_submit('local muri = require("muri")\n') == 'local muri = require("muri")\n'


@pytest.mark.parametrize(
    ("there", "included"),
    [
        ("optional /x/muri_spank.so\n", False),
        (f"include {hooks.FRAGMENT}\n", False),
        ("# optional muri_spank.so\n", True),
    ],
)
def test_a_plugin_is_included_where_it_is_not_already(there, included):
    after = hooks.with_plugstack(there, [there])
    assert (after != there) == included
    assert f"include {hooks.FRAGMENT}\n" in after or not included
    assert without_marks(after) == there


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "slurm"
    folder.mkdir()
    (folder / "slurm.conf").write_text(SITE + "Include more/*.conf\n")
    (folder / "more").mkdir()
    (folder / "more/extra.conf").write_bytes(b"# caf\xe9\nNodeName=n9 Gres=gpu:1\n")
    fragment, module = tmp_path / "fragment", tmp_path / "job_submit.lua"
    fragment.touch()
    module.touch()
    return Site(folder / "slurm.conf", fragment, module)


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_site_is_completed_and_restored(site):
    folder = site.main.parent
    before = tree(folder)
    changes = missing(site, with_licence=True)
    assert {change.path.name for change in changes} == {
        "slurm.conf", "extra.conf", "gres.conf", "plugstack.conf", "job_submit.lua",
    }  # fmt: skip
    replace_files(changes, keep_backups=True)
    assert missing(site, with_licence=True) == []
    assert (folder / "slurm.conf.before-muri").read_bytes() == before[Path("slurm.conf")]
    replace_files(added(site), keep_backups=False)
    assert tree(folder) == before
    assert not any(is_marked(text.decode("latin-1")) for text in tree(folder).values())


def test_where_one_file_cannot_be_replaced_all_stay(site):
    folder = site.main.parent
    before = tree(folder)
    changes = missing(site, with_licence=True)
    broken = [*changes, type(changes[0])(folder / "nowhere/x.conf", None, "x")]
    with pytest.raises(SetupError, match="Every file is as it was"):
        replace_files(broken, keep_backups=True)
    assert tree(folder) == before


def test_a_link_stays_a_link(site):
    folder = site.main.parent
    real = folder.parent / "real.conf"
    site.main.rename(real)
    site.main.symlink_to(real)
    replace_files(missing(site, with_licence=True), keep_backups=True)
    assert site.main.is_symlink()
    assert "muri_gate" in real.read_text()
