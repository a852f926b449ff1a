"""Muri on a site: installed from packages by the pages of the documentation, used, and removed without a trace."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from installed_site import bare_site, built, copy_packages, follow, machine, name_slurm, slurm_itself, users_python
from muri_cluster import CONTROLLER_PY, TRAIN_PY, TRAIN_SH, slow_in
from sandboxes import INSTEAD

from muri.profiler.exchange import to_json
from muri.profiler.records import STAGES, ProfileKey
from muri.slurm_plugin.records import comment_tags as tags
from sandbox.driver import Driver
from sandbox.support import CHECKOUT

pytestmark = [pytest.mark.timeout(900)]

#: No group forms on its Slurm.
NO_GROUPS = "bookworm"


class Users:
    """What users do on the site's login host, with an environment of their own that has PyTorch and not Muri."""

    def __init__(self, site: Driver) -> None:
        self.site = site
        self.path = {"PATH": f"{users_python()}:/usr/local/bin:/usr/bin:/bin"}

    def submit(self, *arguments: str) -> int:
        """Run sbatch as alice."""
        return self.site.submit(*arguments, env=self.path, on="login")

    def output(self, job: int) -> str:
        """Return a job's output."""
        return self.site.read(f"/home/alice/slurm-{job}.out")


@contextmanager
def controller_at_work(site: Driver) -> Iterator[None]:
    """What the timer does, more often, and with groups that are watched more often than a site wants."""
    tuned = CONTROLLER_PY.replace("{tuning}", repr({"telemetry_s": 1.0, "poll_s": 0.5, "gate_watch_s": 0.0}))
    site.write("/root/tuned-controller", tuned, user="root")
    command = "exec /usr/lib/muri/controller/bin/python /root/tuned-controller --interval 0.5 2>>/root/controller.log"
    process = site.popen("sh", "-c", command, user="root")
    try:
        site.wait_until(lambda: "muri_gate" in site.run("scontrol", "show", "reservations").stdout, "the first cycle")
        yield
    finally:
        process.terminate()
        process.communicate(timeout=240)


def adapt(site: Driver) -> None:
    """Choose the policy of the paper."""
    text = site.read("/etc/muri/muri.yaml")
    assert text.count("\npolicy: auto\n") == 1
    site.write("/etc/muri/muri.yaml", text.replace("\npolicy: auto\n", "\npolicy: muri-s\n"), user="root", mode="0644")


def know_profiles(site: Driver) -> None:
    """Give the controller profiles of four kinds of jobs, so that nothing waits for dry runs."""
    profiles = [slow_in(stage, ProfileKey(stage, 8, 1, "tesla")) for stage in STAGES]
    site.run("muri", "profile", "import", "-", user="root", stdin=to_json(profiles))


def the_readmes_example(users: Users) -> None:
    """README's example, with a script of this repository and its arguments."""
    job = users.submit("--muri=model=cpu,batch-size=64", "--gres=gpu:1", "examples/train.sh", "examples/train_cpu.py",
                       "--iterations", "12")  # fmt: skip
    fields = users.site.wait_state(job)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), users.output(job)
    assert "done: 12 iterations" in users.output(job)


def doctor_takes_the_real_way(site: Driver) -> None:
    """Each step of a job's way is found to work."""
    told = site.run("muri", "doctor", "--json", user="root").stdout
    found = {each["name"]: each["level"] for each in json.loads(told)["findings"]}
    names = ("SPANK plugin", "cli_filter", "members' GPUs")
    assert {name: found[name] for name in names} == dict.fromkeys(names, "ok"), told


def exit_codes(users: Users) -> None:
    """A script's exit code is its job's, also in sacct."""
    users.site.write("three.py", "import sys; print(sys.argv[1:]); sys.exit(3)")
    users.site.write("three.sh", '#!/bin/sh\nexec muri run three.py "$@"\n')
    job = users.submit("--muri=model=three,alone=1", "--gres=gpu:1", "three.sh", "two words", "--x")
    assert users.site.wait_state(job)["ExitCode"] == "3:0"
    assert "['two words', '--x']" in users.output(job)
    command = ("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode")
    users.site.wait_until(lambda: users.site.run(*command).stdout.strip() == "FAILED|3:0", "the record of the job")


def a_group_of_four(users: Users, suite: str) -> None:
    """Four jobs with different bottlenecks share the one GPU that is free, each with its own output and exit code."""
    site = users.site
    know_profiles(site)
    site.write("train.py", TRAIN_PY)
    site.write("train.sh", TRAIN_SH.format(user="alice"))
    site.run("scontrol", "update", "nodename=n2", "state=drain", "reason=test", user="root")
    other = users.submit("--gres=gpu:1", "--wrap=while [ ! -e enough ]; do sleep 0.2; done")
    site.wait_state(other, "RUNNING")
    jobs = {
        kind: users.submit(f"--muri=model={kind},batch-size=8,duration=4s", "--gres=gpu:1", "--hold", "train.sh", "40",
                           str(code), kind)
        for code, kind in enumerate(STAGES)
    }  # fmt: skip
    site.run("scontrol", "release", ",".join(map(str, jobs.values())))
    ended = {job: site.wait_state(job) for job in jobs.values()}
    site.run("touch", "enough")
    site.wait_state(other)
    site.run("scontrol", "update", "nodename=n2", "state=resume", user="root")
    for code, (kind, job) in enumerate(jobs.items()):
        assert ended[job]["ExitCode"] == f"{code}:0", f"{kind}: {users.output(job)}"
        assert f"finished {job}" in users.output(job)
    states = [tags.parse_state(fields["AdminComment"]) for fields in ended.values()]
    if suite != NO_GROUPS:
        assert None not in states
        assert len({state.pilot for state in states if state}) == 1, ended
    else:
        assert states == [None] * 4


def the_login_host_explains(users: Users) -> None:
    """A user learns there why a job waits, and how the examined site looks, with the modules of muri-node alone."""
    waiting = users.submit("--muri=model=cpu", "--gres=gpu:1", "--hold", "train.sh", "1", "0", "load")
    told = users.site.run("muri", "explain", str(waiting), on="login")
    assert f"Job {waiting} (cpu) of alice: user-held, PENDING in Slurm." in told.stdout
    users.site.run("scancel", str(waiting))
    assert "muri-controller" not in users.site.run("muri", "doctor", on="login", check=False).stderr


def removal(users: Users, before: dict[str, dict[str, str]], slurm_before: dict[str, str]) -> None:
    """Jobs in the queue run on; nothing else stays."""
    site = users.site
    site.write("later.py", "import muri, sys\nwith muri.stage('load'):\n    print(sys.argv[1:])\n")
    site.write("later.sh", '#!/bin/sh\nmuri run --timing later.py "$@"\n')
    running = users.submit("-w", "n1", "--gres=gpu:2", "--wrap=while [ ! -e go ]; do sleep 0.2; done")
    site.wait_state(running, "RUNNING")
    queued = users.submit("--muri=model=later", "--gres=gpu:1", "-w", "n1", "later.sh", "a b")
    assert "muri" in site.job(queued)["AdminComment"]
    follow(site, "removal.md")
    assert site.job(queued)["JobState"] == "PENDING"
    assert "muri" not in site.job(queued).get("AdminComment", "")
    assert "muri" not in site.job(queued).get("Licenses", "")
    site.run("touch", "go")
    fields = site.wait_state(queued)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), users.output(queued)
    assert "['a b']" in users.output(queued)
    follow(site, "removal.md", last=True)
    assert slurm_itself(site) == slurm_before
    for host, files in before.items():
        now = machine(site, host)
        differing = {name for name in {*files, *now} if files.get(name) != now.get(name)}
        assert not differing, f"{host}: {sorted(differing)[:20]}"


@pytest.mark.parametrize("suite", [INSTEAD] if INSTEAD else ["trixie", "forky", NO_GROUPS])
def test_a_site_installs_uses_and_removes_muri(suite: str, capfd: pytest.CaptureFixture[str]) -> None:
    directory = built(suite)
    with bare_site(suite) as site:
        if INSTEAD:
            name_slurm(site)
        copy_packages(site, directory)
        before = {host: machine(site, host) for host in ("ctl", "login", "n1")}
        slurm_before = slurm_itself(site)
        users = Users(site)
        site.run("cp", "-r", str(CHECKOUT / "examples"), "/home/alice/examples")
        assert site.run("sbatch", "--muri", "--wrap=true", on="login", check=False).returncode != 0

        seconds = follow(site, "install.md")
        with capfd.disabled():
            print(f"\ninstalling on {len(site.instance.host_names)} hosts ({suite}): {seconds:.0f} s", flush=True)
        assert "--muri" in site.run("sbatch", "--help", on="login").stdout

        adapt(site)
        if suite != NO_GROUPS:
            doctor_takes_the_real_way(site)
        with controller_at_work(site):
            assert "0 jobs" in site.run("muri", "queue", on="login").stdout
            refused = site.run("muri", "simulate", "x.csv", on="login", check=False)
            assert "muri-controller" in refused.stderr
            the_readmes_example(users)
            exit_codes(users)
            a_group_of_four(users, suite)
            the_login_host_explains(users)
        removal(users, before, slurm_before)


def test_every_step_of_the_pages_names_its_hosts() -> None:
    pages = [(CHECKOUT / "docs" / name).read_text() for name in ("install.md", "removal.md")]
    for text in pages:
        assert "```sh\n" not in text
    assert Path(CHECKOUT / "packaging/ansible/roles/muri").is_dir()
