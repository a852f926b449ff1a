"""The command scripts/fuzz-controller: hostile jobs among ordinary ones, in virtual time or on a sandbox."""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, get_args

from campaign import APART, Campaign, Gate, Outcome, Profiling, compared, run
from users import Attack

from muri_lab.twin.shrink import smallest_failing

POLICIES: Final = (
    "auto", "muri-s", "muri-l", "muri-slurm", "horus", "sjf-bsbf", "synergy", "muri-hybrid", "tiresias",
)  # fmt: skip


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def tried(campaign: Campaign, chosen: Sequence[Attack] | None = None) -> Outcome:
    """Run a campaign and, where hostile jobs have GPUs of their own, compare it with one without them."""
    with _folder() as folder:
        outcome = run(campaign, folder, chosen)
    if campaign.apart and campaign.policy in APART and not outcome.failures:
        with _folder() as folder:
            outcome.failures += compared(campaign, outcome, folder)
    return outcome


def _campaigns(options: argparse.Namespace) -> Iterator[Campaign]:
    for seed in range(options.seed, options.seed + options.seeds):
        for policy in options.policy or POLICIES:
            for gate in options.gate or get_args(Gate):
                for apart in (True, False):
                    yield Campaign(policy, gate, seed, options.jobs, options.ordinary, apart, options.profiling)


def _judged(campaign: Campaign, most_trials: int) -> bool:
    """Run a campaign and tell what came of it, with the smallest set of hostile jobs with which it fails."""
    began_s = time.monotonic()
    outcome = tried(campaign)
    print(
        f"seed {campaign.seed}, {campaign.policy}, {campaign.gate}, {'apart' if campaign.apart else 'together'}: "
        f"{outcome.cycles} cycles, the longest {outcome.longest_cycle_s:.1f} s, {time.monotonic() - began_s:.0f} s in "
        f"all: {'FAILED' if outcome.failures else 'every ordinary job ended'}",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    for text in (*outcome.failures[:10], *(f"left out: {error}" for error in sorted(outcome.left_out)[:10])):
        print(f"  {ascii(text)[1:-1]}", file=sys.stderr, flush=True)
    if not outcome.failures:
        return True
    culprits = smallest_failing(campaign.attacks(), lambda chosen: bool(tried(campaign, chosen).failures), most_trials)
    for attack in culprits:
        print(f"  smallest failing set: {ascii(attack)[:2000]}", file=sys.stderr, flush=True)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run campaigns; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="fuzz-controller",
        description="Tries the controller with hostile jobs among ordinary ones, in virtual time: each ordinary job "
        "must run once to its end, and no cycle may be lost. Exits with 1 and names the seed and the smallest failing "
        "set of hostile jobs if not.",
    )
    parser.add_argument("--jobs", type=int, default=2000, help="hostile jobs [2000]")
    parser.add_argument("--ordinary", type=int, default=200, help="ordinary jobs [200]")
    parser.add_argument("--seed", type=int, default=1, help="the first seed [1]")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds [1]")
    parser.add_argument("--policy", action="append", help="policy, may be repeated [nine of them]")
    parser.add_argument("--gate", action="append", choices=get_args(Gate), help="gate, may be repeated [both]")
    parser.add_argument("--profiling", choices=get_args(Profiling), default="in-place", help="[in-place]")
    parser.add_argument("--trials", type=int, default=40, help="runs spent on making a failing set smaller [40]")
    parser.add_argument(
        "--sandbox",
        metavar="NAME",
        help="submit the jobs on this sandbox instead, a real Slurm, with both gateways; it needs a partition `train` "
        "and a partition `measure` for dry runs",
    )
    options = parser.parse_args(arguments)
    if options.sandbox:
        from real_campaign import main_on_sandbox

        return main_on_sandbox(options.sandbox, options.jobs, options.ordinary, options.seed)
    failed = [campaign for campaign in _campaigns(options) if not _judged(campaign, options.trials)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
