"""A script gives the same in a group as alone, whatever it does: output, files, exit code and state."""

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

from devices import opener
from muri_cluster import MuriCluster
from sandboxes import on_constrained_sites

from sandbox.driver import Driver
from sandbox.support import CHECKOUT

#: As nvidia-smi does, it fails where it finds no GPU.
NVIDIA_SMI = """\
#!/bin/sh
opened=$({opens} | wc -l)
echo "$opened GPU(s)"
[ "$opened" != 0 ]
"""
#: What else lies in the folder of each job.
FILES = {
    "train.py": """\
import os, resource, signal, subprocess, sys, time
import muri

ending, *files = sys.argv[1:] or ["0"]
print("training:", os.path.basename(os.getcwd()), os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("MINE"),
      os.umask(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.nice(0),
      *(open(file).read().strip() for file in files), flush=True)
subprocess.run("./nvidia-smi", check=True)
if ending == "signaled":
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(5))
    open("ready", "w").close()
if ending == "requeued":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    task = os.environ["SLURM_ARRAY_JOB_ID"] + "_" + os.environ["SLURM_ARRAY_TASK_ID"]
    subprocess.run(["scontrol", "requeue", task], check=True)
iterations = 0
while iterations < 5 or ending in ("signaled", "requeued"):
    iterations += 1
    for stage in ("load", "preprocess", "propagate", "synchronize"):
        with muri.stage(stage):
            time.sleep(0.07 if stage == os.environ["SLOW"] else 0.01)
print("trained", flush=True)
sys.exit(int(ending))
""",
    "other.py": """\
import os, subprocess, sys
print(sys.argv[1], os.environ["CUDA_VISIBLE_DEVICES"], os.environ["SLURM_CPUS_ON_NODE"], flush=True)
subprocess.run("./nvidia-smi", check=True)
open(sys.argv[1], "w").write("done")
""",
    "processes.py": """\
import multiprocessing, os, sys
import muri

def square(number):
    return number ** 2, os.environ["CUDA_VISIBLE_DEVICES"]

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    for _ in range(3):
        with muri.stage("preprocess"), context.Pool(2) as pool:
            print(sum(squared for squared, _ in pool.map(square, range(10))), pool.map(square, [3]))
        with muri.stage("propagate"):
            pass
""",
    "loader.py": """\
import threading
from torch.utils.data import DataLoader

if __name__ == "__main__":
    data = DataLoader(list(range(64)), batch_size=8, num_workers=2, multiprocessing_context="spawn")
    print([int(batch.sum()) for batch in data])
    for thread in threading.enumerate():
        # Not joined by the loader: a Python that ends while one gives a semaphore back warns, alone too.
        thread.name.startswith("QueueFeederThread") and thread.join()
""",
    "spawned.py": """\
import os, sys
import torch
import torch.distributed as dist

def work(rank):
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("meeting"), rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    for _ in range(3):
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
    rank or print(model.module.weight.grad.tolist())
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a Python that ends

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
    os.path.exists("meeting") and os.remove("meeting")
""",
    "much.py": """\
import sys
for line in range(100_000):
    print(line, "x" * 55)
sys.exit(3)
""",
}
#: In it a user's script has another root: bind mounts of all folders but one.
OTHER_ROOT = """\
mkdir root
cat > inside.sh <<'END'
for each in /*; do
    [ -L $each ] && cp -P $each root/
    [ -L $each ] || [ $each = /srv ] || { mkdir root$each && mount --rbind $each root$each; }
done
exec chroot root sh -c 'cd "$0" && [ ! -e /srv ] && ./nvidia-smi && muri run train.py' "$PWD"
END
unshare --user --map-root-user --mount sh inside.sh
code=$?
rm -d root/* root && exit $code
"""
SIGNAL_WHEN_READY = "(until [ -e ready ]; do sleep 0.2; done; scancel {} --signal=USR1 $SLURM_JOB_ID) &\n"


@dataclass(frozen=True)
class Case:
    """A job's options, its batch script without the first lines, and how it ends alone."""

    script: str
    options: str = "--gres=gpu:1"
    code: str = "0:0"
    grouped: bool = True
    """False: it need not be a member, as long as it is as alone."""
    tasks: tuple[int, ...] = ()


REQUESTS = ("-n1 --gres=gpu:1", "--gpus=1", "-G1", "--gpus-per-node=1", "--gpus-per-task=1", "--gpu-bind=none")

#: Habits of public batch scripts and reports, each of which once went wrong in a group; then those that never did.
CASES = {
    "torchrun": Case("muri run -m torch.distributed.run --standalone --nproc_per_node=$SLURM_GPUS_ON_NODE train.py"),
    "gpus-per-node": Case("srun -n1 ./nvidia-smi; srun muri run train.py", "--gpus-per-node=1 --ntasks-per-node=1"),
    "variables": Case(  # but for a member's NVIDIA_VISIBLE_DEVICES, which Slurm leaves to users
        "env | grep -oE '^(SLURM|SBATCH|CUDA|GPU|ROCR|NVIDIA|HIP)[A-Z_]*=' | grep -vE 'MURI|NVIDIA' | sort\n"
        "env | grep -E '^(SLURM_(CPUS|MEM|NTASKS|TASKS|NPROCS|JOB_CPUS|JOB_NUM|NNODES|GPUS)|SBATCH)[A-Z_]*=' | sort\n"
        "echo $CUDA_VISIBLE_DEVICES $GPU_DEVICE_ORDINAL $(echo $SLURM_JOB_GPUS | wc -w)\n"
        "MINE=$SLURM_CPUS_PER_TASK muri run train.py",
        "--gres=gpu:1 -c4 --mem=8000",
    ),
    "memory per CPU": Case("MINE=$SLURM_MEM_PER_CPU muri run train.py", "--gres=gpu:1 -c2 --mem-per-cpu=1500"),
    "descriptors": Case(
        "exec 3> written 4< <(echo four)\nmuri run train.py 0 <(echo lr=0.1) /dev/fd/4\n"
        "muri run /dev/fd/5 5<<< 'import os; os.write(3, b\"kept\")'"
    ),
    "two at once": Case(
        "muri run train.py 3 > 3 & a=$!\nmuri run train.py 4 > 4 & b=$!\nwait $a; echo $?\nwait $b; echo $?"
    ),
    "requeued task": Case(
        "[ $SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT = 1 ] && exec muri run train.py requeued\n"
        "MINE=$SLURM_ARRAY_TASK_ID:$SLURM_RESTART_COUNT exec muri run train.py",
        "--gres=gpu:1 --array=1-2",
        tasks=(1, 2),
    ),
    "Python batch script": Case(
        "#!/usr/bin/python3\nimport os, sys\nprint(os.environ.get('MURI_PILOT', 'none'), file=open('pilot', 'w'))\n"
        "sys.argv.append('trained')\nexec(open('other.py').read())",
        grouped=False,
    ),
    "in a comment": Case("# was: muri run train.py\npython3 other.py trained", grouped=False),
    "before and after": Case(
        "set -e\n./nvidia-smi\npython3 other.py prepared\nmuri run train.py && python3 other.py evaluated",
        "--gres=gpu:1 -c4",
    ),
    "srun with GPUs": Case(
        "".join(f"srun -Q {each} ./nvidia-smi\n" for each in REQUESTS) + "srun -Qn1 --gres=gpu:1 muri run train.py"
    ),
    "srun with CPUs": Case("srun -n1 -c 6 muri run train.py", "--gres=gpu:1 -c6"),
    "srun with memory": Case("srun --mem=8G muri run train.py", "--gres=gpu:1 --mem=8G"),
    "another root": Case(OTHER_ROOT),
    "habits": Case(
        "umask 027\nulimit -n 777\nexport MINE=own\nmkdir sub\ncd sub\ncp ../nvidia-smi .\n"
        "exec nice -n 3 muri run ../train.py 7",
        code="7:0",
    ),
    "pool": Case("muri run processes.py fork"),
    "spawned pool": Case("muri run processes.py spawn"),
    "data loader": Case("muri run loader.py"),
    "spawned processes": Case("muri run spawned.py", "--gres=gpu:1 -c2"),
    "module": Case("mkdir pkg; cp train.py pkg; muri run -m pkg.train"),
    "pipe": Case("echo piped | muri run train.py 42 /dev/stdin", code="42:0"),
    "much output": Case("exec muri run much.py", code="3:0"),
    "tee": Case("set -o pipefail\nmuri run train.py 9 | tee log", code="9:0"),
    "signal to a step": Case(
        SIGNAL_WHEN_READY.format("") + "srun muri run train.py signaled 2> err\n[ $? = 5 ] && rm err && exit 4",
        code="4:0",
    ),
    "signal to the shell": Case(
        "trap 'kill -USR1 $training' USR1\n" + SIGNAL_WHEN_READY.format("--batch")
        + "muri run train.py signaled & training=$!\nwait $training\nwait $training\nexit $?",
        code="5:0",
    ),
}  # fmt: skip
#: A private /tmp hides a checkout in /tmp, and with it the sandbox's Muri.
TMP = "/var/tmp" if CHECKOUT.is_relative_to("/tmp") else "/tmp"
PRIVATE_TMP = {
    "private /tmp": Case(
        f"ls -A {TMP}\ncut -d' ' -f5 /proc/self/mountinfo | grep -c '^{TMP}$'\necho batch > {TMP}/kept\n"
        f"muri run train.py 0 {TMP}/kept\nsrun muri run train.py 0 {TMP}/kept"
    ),
    "Python in a private /tmp": Case(f"cp train.py nvidia-smi {TMP}\ncd {TMP}\nexec muri run train.py 7", code="7:0"),
}
OF_DEVICES = ("variables", "Python batch script", "before and after", "srun with GPUs", "another root")

UNPACK = """\
import json, pathlib, sys
for name, text in json.load(sys.stdin).items():
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
"""
COLLECT = """\
import json, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
def told(path):
    size = path.stat().st_size
    return path.read_text("latin-1") if size < 1 << 24 else f"{size} bytes"  # core dumps
print(json.dumps({str(path.relative_to(root)): told(path) for path in files}))
"""
FIRST = "#!/bin/bash\n[ -e pilot ] || echo ${MURI_PILOT-none} > pilot\nexport SLOW="


@dataclass
class Bench:
    """Submits the cases from folders of their own and reads their output and files."""

    muri: MuriCluster
    cases: Mapping[str, Case]

    def __post_init__(self) -> None:
        self.driver, slow = self.muri.driver, cycle(("load", "propagate", "preprocess"))
        self.slow = dict(zip(self.cases, slow, strict=False))
        files = {"nvidia-smi": NVIDIA_SMI.format(opens=opener(self.driver)), **FILES}
        written: dict[str, str] = {}
        for name, case in self.cases.items():
            script = case.script if case.script.startswith("#!") else f"{FIRST}{self.slow[name]}\n{case.script}"
            for where in ("alone", "grouped"):
                named = {**files, "job": f"{script}\n"}.items()
                written |= {f"/home/alice/{where}/{name}/{file}": text for file, text in named}
        self.driver.run("rm", "-rf", "/home/alice/alone", "/home/alice/grouped", user="root")
        self.driver.run("python3", "-c", UNPACK, stdin=json.dumps(written))

    def submit(self, where: str) -> dict[str, int]:
        jobs = {}
        for name, case in self.cases.items():
            mark = f"--muri=model={self.slow[name]},batch-size=8,duration=2s"
            place = ["-p", "gpu", "--nodelist=n2"] if where == "alone" else ["-p", "train", mark]
            folder, output = f"/home/alice/{where}/{name}", "--output=out-%a" if case.tasks else "--output=out"
            options = [*place, *case.options.split(), output, "--job-name=one"]
            jobs[name] = self.driver.submit(*options, f"{folder}/job", chdir=folder)
        return jobs

    def given(self, where: str, name: str, job: int) -> dict[str, Any]:
        """Wait for a case's end; its states, exit codes and restarts, and all its files by name."""
        names = [f"{job}_{task}" for task in self.cases[name].tasks] or [str(job)]
        states = [[self.driver.wait_state(each)[key] for key in ("JobState", "ExitCode", "Restarts")] for each in names]
        told = self.driver.run("python3", "-c", COLLECT, f"/home/alice/{where}/{name}", user="root").stdout
        files: dict[str, str] = json.loads(told)
        for file in files.keys() & {"out"}:
            # The only word that a member's output has of Muri, and Slurm's where a busy node starts a step late.
            words = r"(muri: job \d+ already runs a script in its group|srun: Step created for StepId=).*\n"
            files[file] = re.sub(words, "", files[file])
        return {"states": states, **files}


def compare(muri: MuriCluster, cases: Mapping[str, Case]) -> None:
    """Run the cases alone and, at the same time, on one GPU with another member that is at work all the time."""
    bench = Bench(muri, cases)
    muri.know_profiles(gpu_type="tesla")
    muri.occupy(on="login")
    wrong: dict[str, Any] = {}

    def look(name: str) -> None:
        expected, given = (bench.given(where, name, jobs[name]) for where, jobs in submitted.items())
        was_member = expected.pop("pilot"), given.pop("pilot")[:-1].isdigit() or not cases[name].grouped
        differing = {key for key in expected | given if expected.get(key) != given.get(key)}
        if differing or was_member != ("none\n", True) or expected["states"][-1][1] != cases[name].code:
            wrong[name] = {key: (expected.get(key), given.get(key)) for key in differing | {"states"}}

    with ExitStack() as company:
        company.enter_context(muri.training("synchronize"))
        muri.submit("synchronize")
        submitted = {where: bench.submit(where) for where in ("alone", "grouped")}
        company.enter_context(muri.controller())
        for name in sorted(cases, key=lambda name: cases[name].tasks):
            if cases[name].tasks:  # a requeued one waits for a GPU of its own
                muri.driver.run("rm", "-f", "/home/alice/keep-synchronize", user="root")
            look(name)
    assert wrong == {}, json.dumps(wrong, indent=1)


@on_constrained_sites("forky", "trixie", versions=["v1"])
def test_each_case_gives_in_a_group_what_it_gives_alone(site: Driver) -> None:
    compare(MuriCluster(site), CASES)


@on_constrained_sites("forky", versions=["v2"])
def test_with_devices_constrained_by_cgroups_v2_too(site: Driver) -> None:
    compare(MuriCluster(site), {name: CASES[name] for name in OF_DEVICES})


#: How a site gives each job a /tmp of its own: the parameter is named as the plugin that this Slurm has.
TMPFS = """\
set -- $(find /usr/lib -name namespace_tmpfs.so)
[ $# = 0 ] && echo JobContainerType=job_container/tmpfs || echo NamespaceType=namespace/tmpfs
"""

#: Linux 6.18 numbers namespaces by CPU and keeps only those with a higher number than the keeper's: a node's slurmd
#: has to make them all on a CPU where that holds.
KEEP_NAMESPACES = """\
touch /run/kept
for cpu in $(seq 0 $(($(nproc --all) - 1))); do
    if taskset -c $cpu unshare --mount=/run/kept true; then
        umount /run/kept
        exec taskset -apc $cpu $(cat /run/slurmd-$1.pid)
    fi
done
exit 1
"""
ON_ALL_CPUS = "taskset -apc 0-$(($(nproc --all) - 1)) $(cat /run/slurmd-$0.pid)"


@on_constrained_sites("forky", "trixie", versions=["v1"])
def test_on_a_site_whose_jobs_have_a_tmp_of_their_own(site: Driver) -> None:
    """By Slurm's own plugin, which gives each job a mount namespace."""
    own, nodes = site.read("/etc/slurm/slurm.conf"), ("n1", "n2")

    def started() -> int:
        logs = (site.read(f"/var/log/slurmd-{node}.log", on=node) for node in nodes)
        return sum(log.count("Relinquishing control") for log in logs)

    def reconfigure(conf: str) -> None:
        before = started()
        container = f"AutoBasePath=true\nBasePath=/var/lib/tmp-of-jobs\nDirs={TMP},/dev/shm\n"
        files = {"slurm.conf": conf, "job_container.conf": container}
        for name, host in product(files, ("ctl", *site.instance.host_names)):
            site.write(f"/etc/slurm/{name}", files[name], user="root", mode="0644", on=host)
        site.reconfigure()
        site.wait_until(lambda: started() == before + len(nodes), "the nodes' new slurmds")
        site.wait_until(lambda: "State=IDLE " in site.run("scontrol", "show", "node", "n1").stdout, "an idle node")

    with ExitStack() as stack:
        stack.callback(reconfigure, own)
        stack.callback(site.cancel_all)
        reconfigure(f"{own}{site.run('sh', '-c', TMPFS).stdout}PrologFlags=Contain\n")
        for node in nodes:
            site.run("sh", "-c", KEEP_NAMESPACES, "sh", node, user="root", on=node)
            stack.callback(site.run, "sh", "-c", ON_ALL_CPUS, node, user="root", on=node)  # so is the slurmd after it
        compare(MuriCluster(site), PRIVATE_TMP)
        assert [site.run("test", "-e", f"{TMP}/kept", check=False, on=node).returncode for node in nodes] == [1, 1]
