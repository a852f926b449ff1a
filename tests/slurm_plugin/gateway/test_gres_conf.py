"""Islands from gres.conf, only believed where they fit, and which GPUs jobs have, as Slurm 26.05 tells it of jobs."""

from fake_slurm import FakeSlurm, make_node

from muri.slurm_plugin.gateway.base import GatewayError
from muri.slurm_plugin.gateway.tables import GresConf, gpus_by_node, held_in

TWO = "Name=gpu File=/dev/nvidia0 Cores=0\nName=gpu File=/dev/nvidia1 Cores=1\n"


def islands(conf: GresConf, gpu_count: int = 2):
    return conf.with_islands((make_node("n1", gpu_count=gpu_count),))[0].gpu_islands


def test_islands_come_from_the_file_and_what_it_includes(tmp_path):
    (tmp_path / "gres.conf").write_text("Include more.conf\n")
    (tmp_path / "more.conf").write_text(TWO)
    conf = GresConf(tmp_path / "gres.conf")
    assert islands(conf) == ((0,), (1,))
    assert islands(conf, gpu_count=4) == ()  # Slurm has others
    (tmp_path / "more.conf").write_text(TWO.replace("Cores=1", "Cores=0"))
    assert islands(conf) == ()


def test_without_the_file_nothing_is_known(tmp_path):
    conf = GresConf(tmp_path / "gres.conf")
    assert islands(conf) == ()
    (tmp_path / "gres.conf").write_text(TWO)
    assert islands(conf) == ((0,), (1,))
    (tmp_path / "gres.conf").unlink()
    assert islands(conf) == ()
    assert islands(GresConf(None)) == ()


START = "JobId=7 JobName=wrap JobState={state} Reason=None NodeList={nodes} JOB_GRES=gpu:1 "
SHARE = "Nodes={nodes} CPU_IDs=0-1 Mem=2000 GRES={gres} MinCPUsNode=1"
JOBS = "\n".join(
    (START + SHARE).format(state=state, nodes=nodes, gres=gres)
    for state, nodes, gres in (
        ("RUNNING", "n1", "gpu:1(IDX:0)"),
        ("SUSPENDED", "n[1-2]", "gpu:a100:1(IDX:3),muri:1"),
        ("COMPLETED", "n1", "gpu:1(IDX:1)"),
        ("RUNNING", "n3", ""),
    )
)
PAIRS = "".join(
    f"Name=gpu File=/dev/nvidia{one} Links={links}\n"
    for one, links in enumerate(("-1,1,0,0", "1,-1,0,0", "0,0,-1,1", "0,0,1,-1"))
)


def test_running_jobs_tell_which_gpus_they_have():
    assert gpus_by_node(held_in(JOBS)) == {"n1": (0, 3), "n2": (3,)}


class Telling(FakeSlurm):
    """Slurm of which a test says what GPUs are in use."""

    asked = 0
    fails = False

    def gpus_in_use(self):
        self.asked += 1
        if self.fails:
            raise GatewayError("no")
        return (("n1", (0,)), ("n[1-2]", (2,)), ("n[", (1,)))


def test_slurm_is_asked_only_where_it_matters_which_gpus_are_free(tmp_path):
    (tmp_path / "gres.conf").write_text(PAIRS)
    conf, slurm = GresConf(tmp_path / "gres.conf"), Telling([], [])
    idle = make_node("n2", gpu_count=4)
    told = make_node("n3", gpu_count=4, gpus_allocated=1, gpus_in_use=(3,))
    unlike = make_node("n4", gpu_count=2, gpus_allocated=1)
    assert conf.with_places(slurm, (idle, told, unlike)) == conf.with_islands((idle, told, unlike))
    assert slurm.asked == 0
    shared = make_node("n1", gpu_count=4, gpus_allocated=2)
    found = conf.with_places(slurm, (shared, idle))
    assert [node.gpus_in_use for node in found] == [(0, 2), ()]
    assert {node.gpu_islands for node in found} == {((0, 1), (2, 3))}
    slurm.fails = True
    assert conf.with_places(slurm, (shared,)) == conf.with_islands((shared,))
    assert slurm.asked == 2
