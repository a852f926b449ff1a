"""An upgrade under a running group, and a downgrade, which is refused; of .rpm packages also the way in and out."""

import pytest
from installed_site import RPM_INSTALL, bare_site, built, copy_packages, follow, machine
from muri_cluster import TRAIN_PY, TRAIN_SH
from test_install_packages import Users, adapt, controller_at_work, know_profiles, the_readmes_example

from muri.slurm_plugin.records import comment_tags as tags
from sandbox.cluster import Shape
from sandbox.driver import Driver
from sandbox.support import CHECKOUT

# The last node of a site is reserved.
SHAPE = Shape(nodes=2, gpus_per_node=1, site=True, accounting=True, bare=True)
pytestmark = [pytest.mark.timeout(900)]

#: On a system made of rpm packages these belong to others.
OF_OTHERS = (
    "/usr/share/fish/vendor_completions.d", "/usr/share/man/man1", "/usr/share/man/man8",
)  # fmt: skip


def install(site: Driver, kind: str, *options: str, check: bool = True) -> list[str]:
    """Install the packages that lie in root's directory `muri` on each host; returns what was said."""
    said = []
    for host in site.instance.host_names:
        names = f"muri/*.{kind}" if host == "ctl" else "muri/muri-shim[_-]* muri/muri-spank[_-]* muri/muri-node[_-]*"
        command = " ".join(({"deb": "dpkg -i", "rpm": RPM_INSTALL}[kind], *options, names, "2>&1"))
        said.append(site.run("sh", "-c", command, user="root", on=host, check=check).stdout)
    return said


def versions(site: Driver) -> set[str]:
    """Which versions a node keeps."""
    return set(site.run("ls", "/usr/lib/muri/versions", user="root", on="n1").stdout.split())


@pytest.mark.parametrize(("kind", "again", "back"), [("deb", (), ()), ("rpm", ("--force",), ("--oldpackage",))])
def test_a_group_outlives_an_upgrade(kind: str, again: tuple[str, ...], back: tuple[str, ...]) -> None:
    """Each version has a directory of its own: what runs finds every file of the version that it began with."""
    first, second = built("trixie", kind=kind), built("trixie", 2, kind=kind)
    with bare_site("trixie", SHAPE) as site:
        for host in site.instance.host_names:
            site.run("mkdir", "-p", *OF_OTHERS, user="root", on=host)
        before = {host: machine(site, host) for host in ("ctl", "login", "n1")}
        copy_packages(site, first, kind)
        follow(site, "install.md", rpm=kind == "rpm")
        asked = ("rpm", "-q", "muri-node") if kind == "deb" else ("dpkg", "-l", "muri-node")
        assert site.run(*asked, user="root", check=False).returncode != 0
        adapt(site)
        users = Users(site)
        site.write("train.py", TRAIN_PY)
        site.write("train.sh", TRAIN_SH.format(user="alice"))
        site.write("keep-training", "")
        know_profiles(site)
        (old,) = versions(site)
        new = old.replace("-1", "-2")
        site.run("cp", "-r", str(CHECKOUT / "examples"), "/home/alice/examples")
        with controller_at_work(site):
            the_readmes_example(users)
        jobs = [  # both wait when the controller looks
            users.submit(f"--muri=model={stage},batch-size=8,duration=9", "--gres=gpu:1", "train.sh", "1", code, stage)
            for stage, code in (("load", "0"), ("propagate", "5"))
        ]
        with controller_at_work(site):
            site.wait_until(lambda: all("started" in users.output(job) for job in jobs), "the start of the group")
            states = [tags.parse_state(site.job(job)["AdminComment"]) for job in jobs]
            assert len({state.pilot for state in states if state}) == 1
            copy_packages(site, second, kind)
            install(site, kind)
            assert versions(site) == {old, new}
            assert site.run("readlink", "/usr/lib/muri/node", on="n1").stdout.startswith(f"versions/{new}/")
            site.run("rm", "keep-training")
            ended = [site.wait_state(job)["ExitCode"] for job in jobs]
            assert ended == ["0:0", "5:0"], [users.output(job) for job in jobs]
            site.wait_until(lambda: not site.run("squeue", "-h").stdout, "the end of the pilot job")
        install(site, kind, *again)
        assert versions(site) == {new}

        copy_packages(site, first, kind)
        said = install(site, kind, *back, check=False)
        assert all("is installed and newer than" in text and "muri drain --wait" in text for text in said)
        assert versions(site) == {new}
        assert site.run("muri", "--version", on="login").returncode == 0
        if kind == "rpm":
            removal(site, before)


def removal(site: Driver, before: dict[str, dict[str, str]]) -> None:
    """Nothing stays but the configuration that was changed."""
    follow(site, "removal.md", rpm=True)
    follow(site, "removal.md", rpm=True, last=True)
    assert site.run("find", "/etc/muri", user="root").stdout == "/etc/muri\n/etc/muri/muri.yaml.rpmsave\n"
    site.run("rm", "-r", "/etc/muri", user="root")  # as the page says
    for host, files in before.items():
        now = machine(site, host)
        differing = {name for name in {*files, *now} if files.get(name) != now.get(name)}
        assert not differing, f"{host}: {sorted(differing)[:20]}"
