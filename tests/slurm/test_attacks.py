"""Attacks on another user, on root's controller, on the node and on the queue's order, tried on a real Slurm."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from muri_cluster import DRY_RUNS
from sandboxes import emptied
from site_cluster import SiteCluster

from sandbox.driver import Driver
from sandbox.source import SOURCE_PREFIX
from sandbox.support import CHECKOUT

pytestmark = pytest.mark.thorough

GPU = "gres=gres/gpu:1"

TOOLS = rf"""
exec 2>&1
forge() {{ how=$1; shift; printf '%s\0' "$@" | /tmp/forge "$how" 2>&1 | cut -c-300; }}
digits() {{ printf "%0$1d" 0; }}
fields() {{ for job in $(squeue -h -o %A); do scontrol show job $job | grep -o "$1=.*[^ ]"; done | cut -c-300; }}
plugin={CHECKOUT}/slurm_plugin
"""
"""For all shell texts: `forge HOW KEY=VALUE...` (see forge.c), N digits, and a field of each job in the queue."""


@dataclass(frozen=True)
class Attack:
    """One that needs neither a group nor a controller at work."""

    does: str  # What alice does, in shell
    look: str  # What root does then. No control character is printed, and no traceback.
    seen: str  # What both together print, a pattern


STRANGE = r"\u001b]0;owned\u0007\u202e[red]"
EXPOSURES = {"muri-controller-events.service": 2.4, "muri-controller.service": 2.4, "muri-watchdog.service": 2.2}
"""What systemd says of the units, of 10."""

ATTACKS = {
    "an AdminComment at submission": Attack(
        "for how in batch allocation batch-het allocation-het $(forge batch hold=1);"
        " do forge $how admin_comment=muri-pilot:t:9; done | grep -o denied",
        "forge batch admin_comment=muri-pilot:root; fields AdminComment",
        r"(denied\n){5}\d+\nAdminComment=muri-pilot:root\n",
    ),
    "a forged mark": Attack(
        "for mark in model=m 'on muri-pilot:t:9' 'model=m muri-pilot:t:9' 'model=m\nmuri-pilot:t:9' model=m,model=b"
        " batch-size=99999999999999999999 model=%n%s $(digits 100000);"
        f' do forge batch {GPU} hold=1 "spank=MURI_JOB=$mark"; done',
        "fields AdminComment",
        r"(\d+\n){8}AdminComment=muri:model=m muri-calls:no muri-gate:licence\n",
    ),
    "a forged option": Attack(
        "for texts in 'c:model=m' 'c:on muri-pilot:t:9' 'c:model=m muri-pilot:t:9' 'c:model=m\nmuri-pilot:t:9' x"
        " 'c:model=m;c:model=b' c:batch-size=99999999999999999999 c:model=%n%s c:$(digits 100000);"
        f' do forge batch {GPU} hold=1 "spank=MURI_OPTION=$texts"; done',
        "fields AdminComment",
        r"\d+\n(forge: error: muri: --muri.*\nUnspecified error\n){8}"
        r"AdminComment=muri:model=m muri-calls:no muri-gate:licence\n",
    ),
    "forged facts": Attack(
        "for more in '' ' muri-pilot:t:9' '\nmuri-pilot:t' $(digits 5000); do forge batch hold=1 spank=MURI_JOB=model=m"
        f' {GPU} "spank=MURI_FACTS=1.0123456789abcdef.fedcba9876543210.L3Vz.NwA4AA$more"; done',
        "fields AdminComment | sort",
        r"(\d+\n){4}AdminComment=muri:model=m muri-calls:no muri-facts:1\.\S+\.NwA4AA muri-gate:licence\n"
        r"(AdminComment=muri:model=m muri-calls:no muri-gate:licence\n){3}",
    ),
    "odd options": Attack(
        r"""try() { sbatch --muri="$1" --hold --gres=gpu:1 --wrap=true; }
            for text in "model=$(printf '\033[31m')x" model=%n%s "$(printf 'model=a\nmuri-pilot:t:9')" \
              "model=$(digits 100000)"; do
                try "$text"; SBATCH_MURI="$text" sbatch --gres=gpu:1 --wrap=true; done 2>&1 |
              grep -cE 'not submitted|Invalid'
            try model=good 2>&1 | grep -o 'batch job'""",
        "fields AdminComment",
        r"8\nbatch job\nAdminComment=muri:model=good .*\n",
    ),
    "the whole gate": Attack(
        r"""for more in :1000000 =1000000 '*1000000' '' @ctl:9 '(9)' ':9()' ' :9' ': 9' "$(printf '\t:9')" :0x10 :1e6 \
              ,muri_gate:9 :9,muri_gate:9 ::9 :+9 :-9 :09 :9@x '.x:9' '\:9' "$(printf ':9\n')" :9,; do
                for kind in 'matlab:1;' 'matlab:1|' , ''; do forge batch hold=1 "licenses=${kind}muri_gate$more"; done
            done 2>&1 | grep -cE '^[0-9]+$'
            for asked in muri_gate:9 'muri_gate*9' 'matlab:1|muri_gate:9' muri_gate=9 muri_gate:1,muri_gate:1; do
                scontrol update jobid=$(forge batch hold=1 licenses=muri_gate:1) "licenses=$asked"; done 2>&1 |
              grep -c most""",
        r"fields Licenses | sed 's/ [LN].*//; s/^Licenses=//' | tr ',;|' '\n\n\n' | grep gate | sort -u",
        r"[1-9]\d+\n5\nmuri_gate:1\n",
    ),
    "long texts": Attack(
        "for text in comment=$(digits 60000) name=$(digits 200000) licenses=$(digits 100000);"
        " do forge batch hold=1 $text; done; forge batch hold=1 name=$(digits 500)",
        "squeue -h -o %j",
        r"(\D.+\n){3}\d+\n0+\n",
    ),
    "texts that a pattern might take hours to read": Attack(
        f"""forge batch hold=1 "licenses=muri_gate:1$(printf '%100000s')"
            for text in "muri$(printf '%3000000s')" "$(printf '%1000000s' | sed 's/ / muri /g')"; do
                forge batch hold=1 {GPU} spank=MURI_JOB=on "script=#!/bin/sh\n$text"; done""",
        "fields AdminComment",
        r"(\d+\n){3}(AdminComment=muri:on .*\n){2}",
    ),
    "status files of escapes, links, pipes and holes": Attack(
        rf"""srun true; cd /run/muri/1001; ln -s /etc/shadow pilot-9001.json; mkfifo pilot-9002.json
             truncate -s 20G pilot-9003.json
             echo '{{"discipline":"{STRANGE}","pid":1,"members":{{"{STRANGE}":{{"state":"{STRANGE}"}}}}}}' \
                >pilot-9005.json; cat pilot-9001.json""",
        "ulimit -v 4000000; muri top --once; muri top --json | grep -c file",
        r".*Permission denied\n(?s:.*\\x1b\]0;owned.*)\n1\n",
    ),
    "a run directory for everybody, and two with the names of others": Attack(
        """srun true; cd /run/muri/1001; echo '{"discipline":"x","members":{}}' >pilot-9001.json
           ln -sfn /root /tmp/muri-0; mkdir -p /tmp/muri-1002; cp pilot-9001.json /tmp/muri-1002""",
        "muri top --json | grep -c file; chmod 777 /run/muri/1001; muri top --json; chmod 700 /run/muri/1001",
        r"1\nmuri: no group .*\n",
    ),
    "modules in the directory where root works": Attack(
        r"""mkdir -p /tmp/evil/muri; cd /tmp/evil
            for name in sitecustomize usercustomize json yaml click muri/__init__; do
              echo "open('/tmp/evil/imported', 'a').write('$name ')" >$name.py; done; chmod 777 .""",
        """cd /tmp/evil; export MURI_CONFIG=/etc/muri/muri.yaml; {
             muri queue; muri profile list; muri config check --show; muri drain; muri doctor; muri-controller --once
             muri top
           } >/dev/null 2>&1; cat imported; python -c 'import yaml'; cat imported""",
        r"cat: imported: No .*\nyaml ",
    ),
    "a configuration for root": Attack(
        "mkdir -p /tmp/evil; cd /tmp/evil; echo 'state_dir: /tmp/evil/state' | tee muri.yaml >.muri.yaml",
        """cd /tmp/evil; MURI_CONFIG=muri.yaml muri-controller --once; muri-controller --once --config muri.yaml
           MURI_CONFIG=$PWD/muri.yaml muri drain; muri-controller --once; ls""",
        r"(muri: the conf.* is not safe to obey.*\n){3}muri: going on with the built-in .*\n(?!.*\bstate\n)(?s:.*)",
    ),
    "what root has written": Attack(
        "srun true; ln -s /etc /run/muri/1003; mkdir /run/muri/1004; muri drain; muri-controller --once",
        """find /run/muri /etc/muri /opt/muri /var/lib/muri* ! -type l -perm /022
           find /run/muri /etc/muri /opt/muri /var/lib/muri* ! -uid 0 ! -path '/run/muri/100?*'
           ls -d /var/lib/muri-*[0-9] | xargs stat -c %a | sort -u""",
        r"ln: .* denied\nmkdir: .* denied\nmuri: alice may not .*\nmuri: .* must run as root.*\n700\n",
    ),
    "faults in the C sources that a compiler sees": Attack(
        "",
        r"""for file in $plugin/spank/*.c; do
             cc -fanalyzer -Wall -Wextra -Wshadow -Wconversion -Wformat=2 -O1 -c -o /dev/null $file; done; echo $file
           for unit in $plugin/../etc/systemd/muri-*.service; do
             systemd-analyze security --offline=true $unit | sed -n 's/.*level for \(.*\): \(...\).*/\1 \2/p'; done""",
        r"\S+/spank.c\n" + "".join(f"{unit} {level}\n" for unit, level in EXPOSURES.items()),
    ),
}


@pytest.fixture(scope="module")
def forge(accounting_sandbox: Driver) -> None:
    source = Path(__file__).with_name("forge.c")
    accounting_sandbox.run("cc", "-Wall", "-Werror", "-o", "/tmp/forge", str(source), "-lslurm", user="root")


@pytest.fixture
def site(forge: None, accounting_sandbox: Driver) -> Iterator[SiteCluster]:
    for driver in emptied(accounting_sandbox):
        yield SiteCluster(driver, "auto")
        driver.run("sh", "-c", "rm -rf /run/muri/1001/pilot-9* /tmp/muri-* /tmp/evil", user="root")


def shell(site: SiteCluster, text: str, user: str = "alice") -> str:
    return site.driver.run("sh", "-c", TOOLS + text, user=user, check=False).stdout


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_comes_to_nothing(site: SiteCluster, name: str) -> None:
    attack = ATTACKS[name]
    if "systemd-analyze" in attack.look and site.driver.instance.suite.startswith(SOURCE_PREFIX):
        pytest.skip("systemd is in Debian's sandboxes only")
    said = shell(site, attack.does) + shell(site, attack.look, "root")
    assert re.fullmatch(attack.seen, said), ascii(said[-3000:])
    assert_fit_to_print(said)


def assert_fit_to_print(text: str) -> None:
    assert "Traceback" not in text
    assert all(map(str.isprintable, text.split("\n"))), ascii(text)


FRAMES = """
import contextlib, signal, socket, struct, sys

bad = [(1, 2**32 - 1, b"", 3), (1, 2**26 + 1, b"", 3), (2, 2, b"{}", 3), (1, 2, b"[]", 3), (1, 5000, b"[" * 5000, 3)]
for version, length, body, files in [*bad, *((1, 2, b"{}", count) for count in (0, 1, 3, 253))]:
    peer = socket.socket(socket.AF_UNIX)
    peer.connect(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):
        socket.send_fds(peer, [struct.pack("!BI", version, length) + body], [0] * files)
    print(peer.recv(4096)[5:].decode())
idle = [socket.socket(socket.AF_UNIX) for _ in range(75)]
for peer in idle:
    peer.connect(sys.argv[1])
print("idle", flush=True)
if sys.argv[2:]:
    signal.pause()
"""


def group(site: SiteCluster, *options: str) -> tuple[list[int], int]:
    """Two members that train until `site.go`, and their pilot job."""
    site.block("on1", gpus=1)
    jobs = [site.until_go(kind, "-p", "on1", *options) for kind in ("load", "propagate")]
    site.cycle()
    site.wait_grouped(*jobs)
    pilot = site.pilot(jobs[0])
    assert pilot is not None
    return jobs, pilot


def test_a_runtime_answers_nobody_but_its_user_and_nothing_stops_its_jobs(site: SiteCluster) -> None:
    jobs, pilot = group(site)
    call = ("python", "-c", FRAMES, f"/run/muri/1001/pilot-{pilot}.sock")
    assert "PermissionError" in site.driver.run(*call, user="bob", check=False).stderr
    assert "Permission denied" in shell(site, "ls /run/muri/1001", "bob")
    assert site.driver.run(*call, user="root").stdout.count("belongs to user id 0, not to 1001") == 9
    caller = site.driver.popen(*call, "stay")
    assert caller.stdout
    answers = [caller.stdout.readline() for _ in range(10)]
    assert ["refused" in answer for answer in answers] == [True] * 9 + [False], answers
    site.go()
    assert {site.driver.wait_state(job)["JobState"] for job in jobs} == {"COMPLETED"}
    caller.terminate()
    caller.communicate(timeout=240)


def test_a_step_in_a_pilot_job_ends_with_it(site: SiteCluster) -> None:
    jobs, pilot = group(site)
    stay = "trap '' TERM; touch /tmp/stays; while :; do sleep 1; done"
    step = site.driver.popen("srun", f"--jobid={pilot}", "--overlap", "--gres=gpu:1", "bash", "-c", stay)
    site.driver.wait_until(lambda: site.driver.run("rm", "/tmp/stays").returncode == 0, "the step")
    site.go()
    assert {site.driver.wait_state(job)["JobState"] for job in jobs} == {"COMPLETED"}
    site.driver.wait_state(pilot)
    step.communicate(timeout=240)


HIJACK = """
import ctypes, os, signal, sys

PIDFD_GETFD, seen = 438, set()
while True:
    for name in {each for each in os.listdir("/proc") if each.isdigit()} - seen:
        try:
            if os.stat(f"/proc/{name}").st_uid == os.getuid() and open(f"/proc/{name}/comm").read() == "sbatch\\n":
                seen.add(name)
                os.kill(int(name), signal.SIGSTOP)
                output = ctypes.CDLL(None).syscall(PIDFD_GETFD, os.pidfd_open(int(name)), 1, 0)
                os.write(output, sys.argv[1].encode())
                os.kill(int(name), signal.SIGCONT)
        except OSError:  # it has ended
            pass
"""


SLOW = """
local submit = slurm_job_submit
function slurm_job_submit(job, ...)
  if (job.name or ""):find("^muri") then os.execute("sleep 2") end
  return submit(job, ...)
end

return slurm.SUCCESS
"""


@pytest.fixture
def slow_submission(accounting_sandbox: Driver) -> Iterator[None]:
    """Delay each of Muri's submissions by two seconds, so that the attacker finds its sbatch process."""
    lua = "/etc/slurm/job_submit.lua"
    own = accounting_sandbox.read(lua)
    accounting_sandbox.write(lua, own.removesuffix("return slurm.SUCCESS\n") + SLOW, user="root", mode="0644")
    yield
    accounting_sandbox.write(lua, own, user="root", mode="0644")


@DRY_RUNS
@pytest.mark.usefixtures("slow_submission")
def test_a_users_sbatch_names_another_users_job_in_vain(site: SiteCluster) -> None:
    """That of a pilot job, and that of a dry run; what follows a semicolon is the name of a cluster."""
    driver, train = site.driver, ("--gres=gpu:1", "/home/alice/train.sh", "9", "0", "load")
    bobs = driver.submit("--hold", "--gres=gpu:1", "--wrap=true", user="bob")
    before = driver.job(bobs)
    site.block("on1", gpus=1)
    jobs = site.pair("-p", "on1")
    driver.submit("-p", "on3", "--muri=model=new,batch-size=8", *train)
    hijack = driver.popen("python", "-c", HIJACK, f"{bobs};")
    said = ""

    def refused() -> bool:
        nonlocal said
        said += site.cycle().stderr
        refusal = rf"cannot submit job '{{}}': job {bobs}, which sbatch named, is another one \(of bob\)"
        return all(re.search(refusal.format(name), said) for name in (r"muri:[\d+]+", "muri-dryrun"))

    driver.wait_until(refused, "the refusals")
    hijack.terminate()
    hijack.communicate(timeout=240)
    assert driver.job(bobs) == before
    assert {job["JobState"] for job in site.cycles_until_ended(*jobs).values()} == {"COMPLETED"}


MISCHIEF = r"""
import random, subprocess

COMMENTS = ("[" * 400, '{"a":' * 150, '{"at":1e308,"error":NaN}', '{"iteration_s":-1}', "1" * 500, "\x1b[2J")
NAMES = ("muri:1+2", "muri-dryrun", "n" * 99, "\x1b]0;owned\x07", "\u202egnp.")
KINDS = '''hold {}|uhold {}|release {}|requeue {}|requeuehold {}|suspend {}|top {}|update jobid={} timelimit=1
update jobid={} gres=gpu:2|update jobid={} gres=|update jobid={} licenses=|update jobid={} licenses=muri_gate:9
update jobid={} name=muri:1+2|update jobid={} comment=muri-pilot:t:1,2|update jobid={} numnodes=2
update jobid={} starttime=now+60|update jobid={} dependency=singleton|update jobid={} numcpus=3
update jobid={} qos=small|update jobid={} excnodelist=n2|update jobid={} admincomment=muri:on
update jobid={} partition=on3'''
chosen = random.Random(1).choice

def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, timeout=60, **options).stdout

for number in range(60):
    told = ["comment=muri-" + chosen(("measured", "speed", "profile", "pilot")) + ":" + chosen(COMMENTS), "hold=1",
            "name=" + chosen(NAMES), "gres=gres/gpu:1", "spank=MURI_JOB=model=m,batch-size=8"]
    run("/tmp/forge", "batch", input="".join(each + "\0" for each in told))
folder = "d=$(printf '/tmp/d\n\033[31m\351'); mkdir -p \"$d\"; cd \"$d\";"
run("sh", "-c", folder + "sbatch --hold --muri --gres=gpu:1 /home/alice/train.sh x")
print(len(run("squeue", "--me", "-h", "-o", "%i").splitlines()))  # later some have been released, and have ended
for number in range(40):
    shown = map(str.split, run("squeue", "--me", "-h", "-r", "-o", "%i %j").splitlines())
    job = chosen([each[0] for each in shown if each[1] == "train.sh" or each[1].startswith("muri:")] or ["1"])
    run("scontrol", *chosen(KINDS.replace("\n", "|").split("|")).format(job).split())
    if number % 5 == 0:
        subprocess.Popen(("scancel", "-s", chosen(("STOP", "CONT", "KILL", "USR1")), job))  # may wait for the job
"""


def test_whatever_a_user_does_with_own_jobs_costs_others_nothing(site: SiteCluster) -> None:
    driver, middle = site.driver, ("-p", "middle")
    with site.controller():
        licenses = ["matlab:1|muri_gate:1"] * (driver.instance.slurm_version >= "25.05") + [",muri_gate:1"]
        several = [driver.submit("--gres=gpu:1", f"--licenses={text}", "--wrap=true") for text in licenses]
        for _ in range(2):
            site.submit("load", *middle, "--array=0-5", "--requeue")
        site.pair(*middle)
        bobs = [site.submit(kind, *middle, user="bob") for kind in ("load", "propagate", "load")]
        waiting = int(driver.run("python", "-c", MISCHIEF).stdout)
        looks = ("muri queue", "muri queue --json", f"muri explain {bobs[0]}", "muri doctor")
        said = shell(site, "; ".join(looks), "root")
        for job in several:
            driver.wait_state(job, "COMPLETED")
        driver.run("scancel", "--user=alice")
        for job in bobs:
            driver.wait_state(job, "COMPLETED")
    assert_fit_to_print(said + site.controller_log())
    assert waiting > 60
    assert not re.search("ERROR|cycle skipped", site.controller_log()), site.controller_log()


@contextmanager
def private_accounts(site: SiteCluster) -> Iterator[None]:
    path = "/etc/slurm/slurmdbd.conf"
    before = site.driver.read(path)
    try:
        site.driver.write(path, f"{before}PrivateData=accounts,jobs,usage\n", user="root", mode="0600")
        site.root("sacctmgr", "--immediate", "reconfigure")
        yield
    finally:
        site.driver.write(path, before, user="root", mode="0600")
        site.root("sacctmgr", "--immediate", "reconfigure")


def test_reports_print_no_job_name_and_show_others_what_slurmdbd_shows_them(site: SiteCluster) -> None:
    submit = r"""for name in "$(printf '\033[31m')" '=cmd|/C x' "$(printf 'X\n99|bob')" "$(printf '\342\200\256')"; do
        sbatch --parsable -p on1 --gres=gpu:1 --muri=model=load,batch-size=8,duration=1s -o /dev/null -J "$name" \
            train.sh 5 0 load 2>/dev/null; done"""
    jobs = [int(word) for word in shell(site, submit).split()]
    site.cycles_until_ended(*jobs)
    own = f"muri report {jobs[0]}"
    site.driver.wait_until(lambda: "COMPLETED" in shell(site, own), "the record")
    reports = "; ".join([f"muri report {job}" for job in jobs] + ["muri report --jobs", "muri report"])
    said = shell(site, reports, "root")
    assert_fit_to_print(said)
    assert not re.search(r"cmd|\|bob", said), said
    assert "of alice" in shell(site, own, "bob")
    with private_accounts(site):
        site.driver.wait_until(lambda: "or you may not see it" in shell(site, own, "bob"), "private accounts")
        assert "of alice" in shell(site, own)
        row = re.compile(rf"^ *{jobs[0]} ", re.MULTILINE)  # the number alone may be a part of a date
        assert row.search(shell(site, "muri report --jobs"))
        said = shell(site, "muri report --jobs; muri report; muri report --json", "bob")
        assert not ("alice" in said or row.search(said)), said


def test_metrics_name_no_job(site: SiteCluster) -> None:
    site.configure(metrics_file="/var/lib/muri.prom", partitions=["on1"])
    job = site.submit("secret", "-p", "on1", "--job-name=secret")
    site.cycle()
    said = shell(site, "stat -c '%U %a' /var/lib/muri.prom; cat /var/lib/muri.prom", "bob")
    assert said.startswith("root 644\n")
    assert "muri_" in said
    assert not re.search(rf'secret|alice|="[^"]*(?<![\w.]){job}(?![\w.])[^"]*"', said), said


LIMITS = {
    "GPUs of a QOS": ("MaxTRESPerUser=gres/gpu=0", "QOSMaxGRESPerUser"),
    "CPUs of a QOS": ("MaxTRESPerUser=cpu=1", "QOSMaxCpuPerUserLimit"),
    "time of a QOS": ("MaxWall=1", "QOSMaxWallDurationPerJobLimit"),
    "time of a partition": ("", "PartitionTimeLimit"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_is_passed_by_what_root_had_changed(site: SiteCluster, name: str) -> None:
    """Slurm notes what root changes of a job, and from then on makes exceptions for it."""
    limit, reason = LIMITS[name]
    with site.qos("tight", MaxJobs="-1"), site.partition_setting("on2", "maxtime=2", "maxtime=infinite"):
        jobs, pilot = group(site, "--qos=tight", "-c2", "--time=20")
        jobs.append(site.driver.submit("-p", "on1", "--qos=tight", "-c2", "--time=20", "--gres=gpu:1", "--wrap=true"))
        with site.no_starts("on1"), site.controller():
            site.driver.run("scancel", str(pilot))
            site.driver.wait_until(lambda: all("gpu:1" in site.driver.job(job)["TresPerNode"] for job in jobs), "GPUs")
            if limit:
                site.root("sacctmgr", "--immediate", "modify", "qos", "tight", "set", limit)
            for job in () if limit else jobs:
                site.driver.run("scontrol", "update", f"jobid={job}", "partition=on2")
        for job in jobs:
            site.driver.wait_until(lambda job=job: site.driver.job(job)["Reason"] == reason, f"{reason} of {job}")
