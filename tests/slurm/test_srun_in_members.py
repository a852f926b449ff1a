"""`srun` inside a member starts as its user wrote it, with the CPUs and memory that it has in the same job alone."""

from collections.abc import Iterator

import pytest
from devices import grant
from sandboxes import emptied

from sandbox.driver import Driver

#: One line for each task of a step: CPUs, its step's memory, and how many GPUs it may use.
TASK_SH = """\
#!/bin/bash
tres=$(scontrol show step $SLURM_JOB_ID.$SLURM_STEP_ID | grep -o "mem=[^,]*")
case $MURI_STEP_GPUS in
per-task:*) gpus=${MURI_STEP_GPUS#per-task:} ;;
*) gpus=$(tr , "\\n" <<< "${CUDA_VISIBLE_DEVICES:-$HELD}" | wc -l) ;;
esac
echo "$SLURM_CPUS_ON_NODE $SLURM_CPUS_PER_TASK $tres $gpus"
"""
#: Each form of the command, by an option or by a variable, with what its tasks said.
FORMS_SH = """\
#!/bin/bash
while read -r form; do
    said=$(eval "${form/srun/timeout 60 srun}" ./task.sh 2> err < /dev/null | sort | uniq -c)
    echo "$form: ${said:-$(grep -vc "^$" err)}"
done < forms
"""
MEMBER_SH = """\
#!/bin/bash
export MURI_PILOT=1 SLURM_JOB_GPUS=0,1 SLURM_GPUS_ON_NODE=2 HELD=0,1
. ./forms.sh
"""
STARTED = """\
srun
srun --gres=gpu:2
srun -n1 --gres=gpu:1
srun --gpus=2
srun -n1 -G1
srun -n1 --gpus-per-node=1
srun --gpus-per-task=1
srun -n1 --gpus-per-task=2
srun --gpus-per-socket=1 --sockets-per-node=1
srun --gpu-bind=closest
srun -G2 --gpu-bind=closest
srun -G2 --gpu-bind=single:1
srun -G2 --gpu-bind=per_task:1
srun --gpu-bind=none --gpus-per-task=1
srun --tres-bind=gres/gpu:single:1
srun --tres-per-task=gres/gpu:1
srun --tres-per-task=cpu=1,gres/gpu:1
srun --mem=1G -G2
srun -n1 -c4 -G2
srun -n1 -c1 --exact -G2
srun -n1 --overlap -G2
srun --exclusive -G2
srun -G2 --gres-flags=enforce-binding
srun --export=PATH,HELD --gpus-per-task=1
SLURM_GPUS=2 srun
SLURM_GPUS_PER_NODE=1 srun -n1
SLURM_GPUS_PER_TASK=1 srun
SLURM_GPUS_PER_SOCKET=1 srun --sockets-per-node=1
SLURM_GRES=gpu:1 srun -n1
SLURM_GPU_BIND=closest srun
SLURM_TRES_BIND=gres/gpu:per_task:1 srun
SLURM_TRES_PER_TASK=cpu=2,gres/gpu=1 srun
env -u SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU=500 srun
SLURM_EXPORT_ENV=PATH,HELD srun -n1 -G1
"""
REFUSED = """\
srun -G3
srun --gres=gpu:3
srun --gpus-per-node=3
srun --gpus-per-task=2
SLURM_GPUS=3 srun
"""


@pytest.fixture(params=["sandbox", "trixie_sandbox"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """An empty sandbox with the scripts; `bash` is not in the PATH that a step exports."""
    for each in emptied(request.getfixturevalue(request.param)):
        for name, text in (("task.sh", TASK_SH), ("forms.sh", FORMS_SH), ("member.sh", MEMBER_SH)):
            each.write(name, text)
        yield each


def said(driver: Driver, script: str, request: str, forms: str) -> dict[str, list[str]]:
    """What each form printed in a job of two tasks with two CPUs each."""
    driver.write("forms", forms)
    job = driver.submit(f"--gres={request}", "-n2", "-c2", "--mem=2000", "--output=out", script)
    driver.wait_state(job, "COMPLETED")
    found: dict[str, list[str]] = {}
    for line in driver.read("/home/alice/out").splitlines():
        form, separator, rest = line.rpartition(": ")
        found.setdefault(form if separator else [*found][-1], []).append(rest.strip())
    return found


def test_a_step_has_the_same_cpus_and_memory_as_alone(driver: Driver) -> None:
    alone = said(driver, "forms.sh", "gpu:2", STARTED)
    member = said(driver, "member.sh", "muri:1", STARTED)
    assert list(alone) == STARTED.splitlines()
    assert all(len(lines[0].split()) == 5 for lines in alone.values()), alone
    assert member == alone


def test_other_gres_of_the_site_stay_in_the_request(driver: Driver) -> None:
    forms = "srun -n1 --gres=gpu:2,muri:1\nsrun -n1 --gres=gpu:2,muri:2\n"
    granted, refused = said(driver, "member.sh", "muri:1", forms).values()
    assert granted[0].startswith("1 ")
    assert refused == ["1"]
    assert "Invalid generic resource (gres) specification" in driver.read("/home/alice/err")


def test_more_gpus_than_the_job_has_are_refused_as_by_slurm(driver: Driver) -> None:
    alone = said(driver, "forms.sh", "gpu:2", REFUSED)
    assert set(map(tuple, alone.values())) == {("1",)}
    assert list(said(driver, "member.sh", "muri:1", REFUSED)) == list(alone)
    assert "muri: the step asks for more GPUs than its job has, 2" in driver.read("/home/alice/err")


def test_components_of_a_heterogeneous_step_each_have_their_own(driver: Driver) -> None:
    see = "sh -c 'echo $SLURM_PROCID ${MURI_STEP_GPUS-all}'"
    components = (f"-n1 --gpus-per-task=1 {see}", f"-n1 --gpus-per-node=2 {see}", f"-n1 -G1 {see}")
    driver.write("het.sh", f"#!/bin/bash\nexport MURI_PILOT=1 SLURM_JOB_GPUS=0,1\nsrun {' : '.join(components)}\n")
    job = driver.submit("--gres=muri:1", "-N3", "-n3", "--output=out", "het.sh")
    assert driver.wait_state(job)["JobState"] == "COMPLETED", driver.read("/home/alice/out")
    told = sorted(driver.read("/home/alice/out").splitlines())
    assert told == ["0 per-task:1", "1 all", "2 per-task:1"]


def test_jobs_from_inside_a_member_are_not_its_steps(driver: Driver) -> None:
    """sbatch, salloc and an srun with a job of its own get the GPUs they ask for, and forget the member."""
    see = "sh -c 'echo ${MURI_PILOT-none} ${MURI_STEP_GPUS-none} $CUDA_VISIBLE_DEVICES'"
    script = (
        "#!/bin/bash\nexport MURI_PILOT=1 MURI_STEP_GPUS=per-task:1 SLURM_JOB_GPUS=0\n"
        f"""salloc -Q --gres=gpu:2 srun --gres=gpu:2 {see}\n"""
        f"""sbatch -Q --wait --gres=gpu:2 --output=inner --wrap "{see.replace("$", chr(92) + "$")}"\n"""
        f"""env $(env | sed -n 's/^\\(SLURM_[A-Z_]*\\)=.*/-u \\1/p') srun -Q --gres=gpu:2 {see}\n"""
    )
    driver.write("inside.sh", script)
    job = driver.submit("--gres=muri:1", "--output=out", "inside.sh")
    assert driver.wait_state(job)["JobState"] == "COMPLETED", driver.read("/home/alice/out")
    assert driver.read("/home/alice/out") == "none none 0,1\n" * 2
    assert driver.read("/home/alice/inner") == "none none 0,1\n"


def test_a_step_does_not_pass_its_part_on_to_the_steps_it_starts(driver: Driver) -> None:
    inner = "srun --overlap --mem=0 -n1 sh -c 'echo ${MURI_STEP_GPUS-all}'"
    script = f'#!/bin/bash\nexport MURI_PILOT=1 SLURM_JOB_GPUS=0,1\nsrun -n1 -G1 bash -c "{inner}"\n'
    driver.write("nested.sh", script.replace("${", "\\${"))
    job = driver.submit("--gres=muri:1", "--mem=2000", "--output=out", "nested.sh")
    assert driver.wait_state(job)["JobState"] == "COMPLETED", driver.read("/home/alice/out")
    assert driver.read("/home/alice/out") == "all\n"


def test_variables_that_count_by_the_gpu_do_not_stop_a_step(driver: Driver) -> None:
    forms = "SLURM_CPUS_PER_GPU=1 srun -G2\nSLURM_NTASKS_PER_GPU=1 srun -G2\n"
    found = said(driver, "member.sh", "muri:1", forms)
    assert [lines[0].split()[:2] for lines in found.values()] == [["2", "4"]] * 2


def test_a_broken_cli_filter_of_muri_stops_no_step(driver: Driver) -> None:
    module = "/opt/muri/cli_filter/muri.lua"
    own = driver.read(module)
    driver.write(module, "broken(", user="root", mode="0644")
    try:
        assert driver.run("srun", "--gres=gpu:1", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "0\n"
    finally:
        driver.write(module, own, user="root", mode="0644")


def test_steps_of_a_member_have_the_gpus_that_they_ask_for(driver: Driver) -> None:
    """By the real grant: from the request of the batch script, the option or the variable to what tasks see."""
    see = "printenv CUDA_VISIBLE_DEVICES"
    pilot = driver.submit("--gres=gpu:2", "--nodelist=n1", "--wrap=sleep 600")
    driver.wait_state(pilot, "RUNNING")
    script = (
        f"#!/bin/bash\n{see}\nsrun {see} | sort\nsrun --gpus-per-task=1 {see} | sort\nsrun -n1 -G1 {see}\n"
        f"SLURM_GPUS_PER_NODE=2 srun -n1 -c2 {see}\nsrun -n1 --gres=gpu:2 --export=NONE /usr/bin/{see}\n"
        f"srun -n1 -G3 {see} 2>&1 | grep -o muri:.*\n"
    )
    driver.write("member.sh", script)
    job = driver.submit("--hold", "--gres=muri:1", "--nodelist=n1", "-n2", "-c2", "--export=ALL,MURI_JOB=on",
                        "--output=out", "member.sh")  # fmt: skip
    grant(driver, job, f"muri-grant:{pilot}")
    driver.wait_state(job)
    said = driver.read("/home/alice/out").splitlines()
    # A step may have to wait until Slurm has cleared the one before away, which srun says.
    assert [line for line in said if not line.startswith("srun: ")] == [
        "0,1", "0,1", "0,1", "0", "1", "0", "0,1", "0,1", "muri: the step asks for more GPUs than its job has, 2"
    ]  # fmt: skip
