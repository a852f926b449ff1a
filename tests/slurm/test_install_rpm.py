"""Muri's .rpm packages under a real rpm: installed by the page, upgraded under a running job, and removed."""

import pytest
from installed_site import (
    RPM_INSTALL,
    bare_site,
    built,
    copy_packages,
    follow,
    machine,
)
from site_cluster import UNTIL_GO_PY
from test_install_packages import Users, adapt, controller_at_work, know_profiles, the_readmes_example
from test_install_upgrade import MEMBER_SH, SHAPE, versions

from sandbox.driver import Driver
from sandbox.support import CHECKOUT

pytestmark = [pytest.mark.timeout(900)]
HOSTS = ("ctl", "login", "n1")
OF_OTHERS = (
    "/usr/lib64/slurm", "/usr/share/fish/vendor_completions.d", "/usr/share/man/man1", "/usr/share/man/man8",
)  # fmt: skip


def install(site: Driver, *options: str, check: bool = True) -> list[str]:
    """Install the packages that lie in root's directory `muri` on each host; returns what was said."""
    said = []
    for host in HOSTS:
        names = "muri/*.rpm" if host == "ctl" else "muri/muri-shim-* muri/muri-spank-* muri/muri-node-*"
        command = " ".join((RPM_INSTALL, *options, names, "2>&1"))
        said.append(site.run("sh", "-c", command, user="root", on=host, check=check).stdout)
    return said


def test_a_site_with_rpm_installs_upgrades_and_removes_muri() -> None:
    first, second = built("trixie", kind="rpm"), built("trixie", 2, kind="rpm")
    with bare_site("trixie", SHAPE) as site:
        for host in HOSTS:  # on a system made of rpm packages these belong to others
            site.run("mkdir", "-p", *OF_OTHERS, user="root", on=host)
        before = {host: machine(site, host) for host in HOSTS}
        copy_packages(site, first, "rpm")
        follow(site, "install.md", rpm=True)
        assert site.run("rpm", "-q", "muri-controller", user="root").stdout.startswith("muri-controller-")
        assert site.run("dpkg", "-l", "muri-node", user="root", check=False).returncode != 0
        adapt(site)
        users = Users(site)
        site.run("cp", "-r", str(CHECKOUT / "examples"), "/home/alice/examples")
        site.write("until_go.py", UNTIL_GO_PY)
        site.write("member.sh", MEMBER_SH)
        know_profiles(site)
        (old,) = versions(site, "n1")
        new = old.replace("-1", "-2")
        with controller_at_work(site):
            the_readmes_example(users)
            job = users.submit("--muri=model=load,batch-size=8,alone=1", "--gres=gpu:1", "member.sh", "load", "5")
            site.wait_until(lambda: "started" in users.output(job), "the start of the job")
            copy_packages(site, second, "rpm")
            install(site)
            assert versions(site, "n1") == {old, new}
            assert site.run("readlink", "/usr/lib/muri/node", on="n1").stdout.startswith(f"versions/{new}/")
            site.run("touch", "go")
            assert site.wait_state(job)["ExitCode"] == "5:0", users.output(job)
        install(site, "--force")
        assert versions(site, "n1") == {new}

        copy_packages(site, first, "rpm")
        said = install(site, "--oldpackage", check=False)
        assert all(f"{new} is installed and newer than {old}" in text and "muri drain --wait" in text for text in said)
        assert versions(site, "n1") == {new}
        assert site.run("muri", "--version", on="login").returncode == 0

        follow(site, "removal.md", rpm=True)
        follow(site, "removal.md", rpm=True, last=True)
        assert site.run("find", "/etc/muri", user="root").stdout == "/etc/muri\n/etc/muri/muri.yaml.rpmsave\n"
        site.run("rm", "-r", "/etc/muri", user="root")  # as the page says
        for host, files in before.items():
            now = machine(site, host)
            differing = {name for name in {*files, *now} if files.get(name) != now.get(name)}
            assert not differing, f"{host}: {sorted(differing)[:20]}"
