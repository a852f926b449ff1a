"""Whether plans are as good as those recorded: the same, or others with no less progress of all jobs together.

python -m muri_lab.benchmarks.scale_plans --record     keep today's plans as the ones to compare with
python -m muri_lab.benchmarks.scale_plans              compare; exit code 1 where one is worse
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import click

from muri.policies.registry import describe_policies
from muri.policies.types import Plan
from muri.slurm_plugin.controller.assemble import policy_of
from muri.slurm_plugin.planning.decision import Decision, decide
from muri_lab.benchmarks.machine import describe_machine
from muri_lab.benchmarks.scale_clusters import Size, cycle_of

RECORDED: Final = Path(__file__).with_name("results") / "scale_plans.json"

SIZES: Final = {
    "idle, 1 user": Size(400, 50, 1),
    "idle, 20 users": Size(400, 50, 20),
    "crowded, 1 user": Size(400, 12, 1),
    "crowded, 20 users": Size(400, 12, 20),
    "half taken": Size(400, 30, 10, groups=120),
    "groups at work, full": Size(400, 30, 10, groups=120, full=True),
    "groups at work, full, 1 user": Size(400, 30, 1, groups=120, full=True),
}

_ROUNDING: Final = 1e-6


def plans(chosen: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plan every cluster with the policies of the live controller, all of them or those chosen."""
    policies = [
        info.name for info in describe_policies() if info.live != "no" and info.name in (chosen or (info.name,))
    ]
    for (place, size), policy in product(SIZES.items(), policies):
        cycle = cycle_of(size, policy=policy)
        yield f"{policy}: {place}", _figures(decide(cycle, policy_of(cycle.config)))


def _figures(decision: Decision) -> dict[str, Any]:
    plan = decision.plan
    text = repr((plan.groups, plan.solo, plan.sharers, plan.waiting, decision.actions))
    groups = [group for group in plan.groups if not group.kept or group.joining]
    return {
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        "running": len(_at_work(plan)),
        "speed": round(_speed(plan), 4),
        "efficiency": round(sum(group.efficiency * group.gpu_count for group in groups), 4),
        "actions": len(decision.actions),
        "quarantined": len(decision.quarantine.jobs),
    }


def _at_work(plan: Plan) -> set[int]:
    grouped = {job_id for group in plan.groups for job_id in group.members}
    return grouped | {solo.job_id for solo in plan.solo} | {sharer.job_id for sharer in plan.sharers}


def _speed(plan: Plan) -> float:
    """Progress of all jobs together, 1 for each that is as fast as alone."""
    return sum(sum(group.speed.values()) for group in plan.groups) + len(plan.solo) + len(plan.sharers)


def _verdict(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    if before is None:
        return "new"
    if now["digest"] == before["digest"]:
        return "same"
    better = now["speed"] >= before["speed"] * (1 - _ROUNDING) and now["running"] >= before["running"]
    return "other" if better else "WORSE"


@click.command(help=__doc__)
@click.option("--policy", "chosen", multiple=True, help="Only plans of these policies.")
@click.option("--record", is_flag=True, help=f"Keep the plans in {RECORDED.name}.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def main(*, chosen: tuple[str, ...], record: bool, as_json: bool) -> None:
    """Compare."""
    now = dict(plans(chosen))
    if record:
        content = {"machine": describe_machine(), "plans": now}
        RECORDED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    before = json.loads(RECORDED.read_text(encoding="utf-8"))["plans"]
    verdicts = {name: _verdict(figures, before.get(name)) for name, figures in now.items()}
    if as_json:
        click.echo(json.dumps({name: {"verdict": verdicts[name], **now[name]} for name in now}, indent=1))
    for name, verdict in verdicts.items():
        if verdict != "same":
            click.echo(f"{verdict:6} {name}: {now[name]} (before {before.get(name)})", err=True)
    sys.exit("WORSE" in verdicts.values())


if __name__ == "__main__":
    main()
