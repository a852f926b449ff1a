"""gres.conf is read with the files that it includes, anew when it has changed, and only believed where it fits."""

from fake_slurm import make_node

from muri.slurm_plugin.gateway.gres_conf import GresConf

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
