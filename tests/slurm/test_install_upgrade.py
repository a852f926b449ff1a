"""An upgrade under a running group, and a downgrade, which is refused."""

import pytest
from installed_site import bare_site, built, copy_packages, follow, users_python
from site_cluster import UNTIL_GO_PY
from test_install_packages import Users, adapt, controller_at_work, know_profiles, the_readmes_example

from muri.slurm_plugin.records import comment_tags as tags
from sandbox.cluster import Shape
from sandbox.driver import Driver
from sandbox.support import CHECKOUT

# The last node of a site is reserved.
SHAPE = Shape(nodes=2, gpus_per_node=1, site=True, accounting=True, bare=True)
pytestmark = [pytest.mark.timeout(900)]

MEMBER_SH = """\
#!/bin/sh
muri run until_go.py "$1"
exit $(($? + $2))
"""


def install(site: Driver, *, check: bool = True) -> list[str]:
    """Install the packages that lie in root's directory `muri` on each host; returns what was said."""
    said = []
    for host in site.instance.host_names:
        names = "muri/*.deb" if host == "ctl" else "muri/muri-shim_* muri/muri-spank_* muri/muri-node_*"
        done = site.run("sh", "-c", f"dpkg -i {names} 2>&1", user="root", on=host, check=check)
        said.append(done.stdout)
    return said


def versions(site: Driver, host: str) -> set[str]:
    """Which versions a host keeps."""
    return set(site.run("ls", "/usr/lib/muri/versions", user="root", on=host).stdout.split())


def test_a_group_outlives_an_upgrade() -> None:
    """Each version has a directory of its own: what runs finds every file of the version that it began with."""
    first, second = built("trixie"), built("trixie", 2)
    with bare_site("trixie", SHAPE) as site:
        copy_packages(site, first)
        follow(site, "install.md")
        adapt(site)
        users = Users(site)
        assert str(users_python()) in users.path["PATH"]
        site.write("until_go.py", UNTIL_GO_PY)
        site.write("member.sh", MEMBER_SH)
        know_profiles(site)
        (old,) = versions(site, "n1")
        site.run("cp", "-r", str(CHECKOUT / "examples"), "/home/alice/examples")
        with controller_at_work(site):
            the_readmes_example(users)
        jobs = [  # both wait when the controller looks
            users.submit(f"--muri=model={kind},batch-size=8,duration=60s", "--gres=gpu:1", "member.sh", kind, code)
            for kind, code in (("load", "0"), ("propagate", "5"))
        ]
        with controller_at_work(site):
            site.wait_until(lambda: all("started" in users.output(job) for job in jobs), "the start of the group")
            states = [tags.parse_state(site.job(job)["AdminComment"]) for job in jobs]
            assert len({state.pilot for state in states if state}) == 1
            copy_packages(site, second)
            install(site)
            assert versions(site, "n1") == {old, old.replace("-1", "-2")}
            assert site.run("readlink", "/usr/lib/muri/node", on="n1").stdout.startswith(f"versions/{old[:-2]}-2/")
            site.run("touch", "go")
            ended = [site.wait_state(job)["ExitCode"] for job in jobs]
            assert ended == ["0:0", "5:0"], [users.output(job) for job in jobs]
            site.wait_until(lambda: not site.run("squeue", "-h").stdout, "the end of the pilot job")
        install(site)
        assert versions(site, "n1") == {old.replace("-1", "-2")}

        copy_packages(site, first)
        said = install(site, check=False)
        assert all("is installed and newer than" in text and "muri drain --wait" in text for text in said)
        assert versions(site, "n1") == {old.replace("-1", "-2")}
        assert site.run("muri", "--version", on="login").returncode == 0
