"""The jobs of a hostile user, and what he does to his jobs and to those that Muri runs in his name."""

from dataclasses import dataclass, replace
from typing import Any, Final

from fake_slurm import behind_license, make_job
from odd import DEPENDENCIES, FEATURES, GPU_REQUESTS, HOST_LISTS, LICENSES, Odd, written

from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job

BOB: Final = {"user": "bob", "uid": 1002, "gid": 1002}
FIRST_HOSTILE_ID: Final = 10_001
_STAGES: Final = ("load_s", "preprocess_s", "propagate_s", "synchronize_s", "iteration_s")

_TAGS: Final = (
    "muri:on", "muri:model=m1,batch-size=8,duration=100", "muri:model=m2,batch-size=8",
    "muri:model=m1,batch-size=1000000000",
    f"muri:model={'x' * 64},duration=315360000,checkpoint=1,accumulate=1024", "muri:duration=1", "muri:alone=1",
    "muri:on muri-script:00000000deadbeef", "muri:model=a/../../b,batch-size=1,duration=1,checkpoint=1",
    "muri:checkpoint=1,accumulate=2 muri-hold:user",
)  # fmt: skip


_WORDS: Final = ("command", "comment", "directory", "name", "submit line")
"""Changes that have no effect on where and when a job may run."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile job and all that its owner will do to it."""

    job: Job  # As he submits it
    seed: str  # What his later acts depend on; not on other jobs, so that an attack by itself goes the same way


def attacks(seed: int, count: int, partition: str, *, gate_license: bool) -> list[Attack]:
    """Return hostile jobs."""
    return [_attack(f"{seed}.{number}", FIRST_HOSTILE_ID + number, partition, gate_license) for number in range(count)]


def _attack(seed: str, job_id: int, partition: str, gate_license: bool) -> Attack:
    odd = Odd(seed)
    job = make_job(job_id, **BOB, partition=partition, admin_comment=odd.one(_TAGS), cpu_count=1, cpus_per_task=1)
    changes = _changes(odd, partition)
    usable = tuple(sorted(changes))
    if odd.chance(0.5):
        # What anybody asks for: these get into groups, and have pilots and dry runs to act on.
        usable, kind = _WORDS, odd.random.randrange(1, 5)
        job = replace(job, admin_comment=f"muri:model=m{kind},batch-size=8,duration=100")
    chosen = odd.random.sample(usable, odd.random.randrange(1, min(9, len(usable) + 1)))
    job = replace(job, **{name: value for each in chosen for name, value in changes[each].items()})
    if gate_license and odd.chance(0.9):
        job = replace(behind_license(job), held=job.reason == "JobHeldAdmin")
    return Attack(job, seed)


def _changes(odd: Odd, partition: str) -> dict[str, dict[str, Any]]:
    """Each way in which a request may be odd, as fields of the job's record."""
    gpus = odd.one((1, 2, 3, 8, odd.count()))
    nodes = odd.one((1, 2, 3, odd.count()))
    return {
        "name": {"name": odd.text("job")},
        "comment": {"comment": odd.comment(written(odd.json()))},
        "submit line": {"submit_line": odd.text("sbatch --muri train.sh")},
        "directory": {"work_dir": odd.text("/home/bob/")},
        "command": {"command": odd.text("/home/bob/train.sh")},
        "gpus": {"gpu_count": gpus, "gpu_request": f"gres/gpu:{gpus}"},
        "several nodes": {"gpu_count": gpus * nodes, "node_count": nodes, "gpu_request": f"gres/gpu:{gpus}"},
        "gres": {"gpu_request": odd.one(GPU_REQUESTS), "gpu_count": odd.one((0, 1, 2, odd.count()))},
        "nodes": {"node_count": odd.count()},
        "cpus": {"cpu_count": odd.count(), "cpus_per_task": max(1, odd.count())},
        "memory": {"mem_per_node_mib": odd.number(), "mem_per_cpu_mib": odd.one((0, odd.number()))},
        "time": {"time_limit_s": odd.one((0, 1, 60, 60 * (2**31), odd.number()))},
        "begin": {"begin_s": float(odd.number())},
        "features": {"features": odd.one(FEATURES)},
        "node list": {"required_nodes": odd.one(HOST_LISTS)},
        "excluded": {"excluded_nodes": odd.one(HOST_LISTS)},
        "licenses": {"licenses": odd.one(LICENSES)},
        "reservation": {"reservation": odd.text("maint")},
        "dependency": {"dependency": odd.one(DEPENDENCIES)},
        "partition": {
            "partition": odd.one((partition, f"{partition},{partition}", "", "no-such", odd.text(partition)))
        },
        "array": {"array": True, "name": "array of 100,000 tasks"},
        "het": {"het": True},
        "interactive": {"batch": False, "command": ""},
        "never again": {"can_requeue": False},
        "special": {"special": odd.one((("--exclusive",), ("--switches", "--core-spec"), (odd.text(),)))},
        "held": {"held": True, "reason": odd.one(("JobHeldUser", "JobHeldAdmin", odd.text("Held")))},
        "account": {"account": odd.text("hep"), "qos": odd.text("normal")},
        "restarts": {"restart_count": odd.count()},
        "priority": {"priority": odd.count()},
    }


def dry_run_result(odd: Odd, token: str) -> str:
    """A dry run's forged result; the user may read its token in AdminComment."""
    figures: dict[str, Any] = {name: odd.one((0.1, 0.2, odd.figure())) for name in _STAGES}
    figures |= {"iterations": odd.one((20, odd.figure())), "gpu_mem_gib": odd.one((1.0, odd.figure())), "token": token}
    if odd.chance(0.3):
        figures["detail"] = odd.json()
    if odd.chance(0.3):
        figures["detail"] = {"stage_cv": odd.json(), "gpu_utilization": odd.figure(), "busy_s": odd.json(1)}
    if odd.chance(0.2):
        figures["error"] = odd.text("no stages")
    if odd.chance(0.3):
        figures["accumulates"] = odd.json(1)
    if odd.chance(0.1):
        return tags.PROFILE_PREFIX + written(odd.json())
    return tags.PROFILE_PREFIX + written(figures)


def pilot_report(odd: Odd, members: tuple[int, ...]) -> str:
    """A forged report of a group, in the comment of the group's own pilot job; it may blame other users' jobs."""

    def report() -> Any:
        figures = {"n": odd.figure(), "t": odd.figure(), "s": odd.json(1), "w": odd.json(1)}
        usual = {"n": 10**9, "t": 0.1, "s": [0.1, odd.figure(), 0.2, 0.1], "w": [0.0, 0.0, 0.0, odd.figure()]}
        return odd.one((figures, usual, odd.figure(), odd.json()))

    speeds = {str(member): report() for member in members} | {"1": report(), "d": odd.one(("fair", odd.json()))}
    fault = {"cause": odd.text("CUDA error"), "culprits": odd.one(([*members], [1, 2, 3, "4"], odd.json()))}
    tokens = [tags.SPEED_PREFIX + written(speeds)]
    if odd.chance(0.3):
        tokens.append("muri-fault:" + written(fault))
    return odd.comment(*tokens)
