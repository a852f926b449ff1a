"""`muri run --accumulate` on real processes: DDP ranks, a member of a group, refusals on the command line."""

import json
from collections.abc import Callable

import pytest
from launcher_harness import Launcher, ends
from polling import until
from ranks_harness import free_port

from muri.group_spec import GroupSpec, MemberSpec, Place
from muri.launcher.job.scheduler import NoMembership
from muri.launcher.runtime.admission import AdmissionControl
from muri.launcher.runtime.member_table import MemberTable

TRAIN = """
    import sys
    import muri, torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    torch.manual_seed(3)
    inputs, targets = torch.randn(40, 8).double(), torch.randint(0, 3, (40,))
    rank, ranks, exchanges, sizes = 0, 1, [], []
    if "--ddp" in sys.argv:
        distributed.init_process_group("gloo")
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
    loader = DataLoader(TensorDataset(inputs[rank::ranks], targets[rank::ranks]), batch_size=10 // ranks)

    def made():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        trained = model
        if ranks > 1:
            import torch.distributed.algorithms.ddp_comm_hooks.default_hooks as hooks
            def count(state, bucket):
                exchanges.append(1)
                return hooks.allreduce_hook(None, bucket)
            trained = nn.parallel.DistributedDataParallel(model)
            trained.register_comm_hook(None, count)
        return model, trained, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    model, trained, optimizer = made()
    for epoch in range(2):
        for x, y in muri.batches(loader) if "--batches" in sys.argv else loader:
            sizes.append(len(x))
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(inputs), targets).item()
    print(f"{loss:.12f}", sizes[:3], len(exchanges), flush=True)
    if "--explicit" in sys.argv:
        exchanges.clear()
        model, trained, optimizer = made()
        accumulate, curve = muri.accumulate(ranks), []
        for batch in loader:
            optimizer.zero_grad()
            for x, y in accumulate(batch):
                accumulate.backward(nn.functional.cross_entropy(trained(x), y))
            optimizer.step()
            curve.append(accumulate.loss)
        mean = torch.stack(curve)
        if ranks > 1:
            distributed.all_reduce(mean)
            distributed.destroy_process_group()
        print((mean / ranks).tolist(), len(exchanges), flush=True)
"""


def test_two_ranks_exchange_once_per_batch(launcher: Launcher) -> None:
    script, home = launcher.script(TRAIN), launcher.folder
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}

    def told(*words: str, name: str, **variables: str) -> Callable[[], tuple[list[str], list[str]]]:
        """Start a run; the result waits for its end and returns the lines of the unchanged and of the explicit loop."""
        launcher.folder = home / name
        launcher.folder.mkdir()
        process = launcher.member(None, *words[:-1], script, words[-1], "--explicit", **variables)

        def lines() -> tuple[list[str], list[str]]:
            assert ends(process) == 0, (home / name / "solo.err").read_text()
            assert "not split" not in (home / name / "solo.err").read_text()
            first, second = (line.rsplit(maxsplit=1) for line in (home / name / "solo.out").read_text().splitlines())
            return first, second

        return lines

    runs = [told("--accumulate", "2", "--ddp", name=rank, RANK=rank, **ranks) for rank in ("0", "1")]
    (whole, _), (curve, _) = told("--alone", name="alone")()
    for run in runs:
        (hooked, exchanges), (explicit, exchanges_too) = run()
        loss, _, sizes = hooked.partition(" ")
        assert float(loss) == pytest.approx(float(whole.split()[0]), rel=1e-9)
        assert (sizes, exchanges, exchanges_too) == ("[3, 2, 3]", "8", "4")
        assert json.loads(explicit) == pytest.approx(json.loads(curve), rel=1e-9)


def test_a_members_iterations_are_whole_batches(launcher: Launcher) -> None:
    launcher.threads("7")
    script = launcher.script(TRAIN)
    for scripts, marks in enumerate(([], ["--batches"]), 1):
        assert ends(launcher.member("7", "--accumulate", "4", script, *marks)) == 0, launcher.err("7")
        assert launcher.out("7").splitlines()[-1].split()[1:4] == ["[3,", "3,", "2]"]
        until(lambda count=8 * scripts: launcher.status()["members"]["7"]["iterations"] == count, "whole batches")
    assert not launcher.err("7")


@pytest.mark.parametrize("number", ["0", "two", "-1", "1.5"])
def test_a_senseless_number_is_refused(launcher: Launcher, number: str) -> None:
    assert ends(launcher.member(None, "--accumulate", number, launcher.script("print('ran')"))) == 2
    assert "give a whole number of 1 or more, or auto" in launcher.err(None)
    assert "Traceback" not in launcher.err(None)
    assert not launcher.out(None)


class Scheduler(NoMembership):
    """Has put jobs 102 and 103 into the group of pilot job 900."""

    def place_of(self, job_id: str) -> Place | None:
        return Place("900", MemberSpec(job_id, accumulate_steps=4 if job_id == "102" else 1))


def test_a_member_hears_what_the_scheduler_chose_for_it() -> None:
    members = (MemberSpec(job_id="101", accumulate_steps=2), MemberSpec(job_id="104"))
    group = GroupSpec(members=members, discipline="fair")
    admission = AdmissionControl("900", MemberTable(group.ids, group.discipline), group, Scheduler)
    assert [admission.refusal(job_id) for job_id in ("101", "102", "103")] == [""] * 3
    chosen = [admission.environment(job_id) for job_id in ("101", "102", "103", "104")]
    assert chosen == [{"MURI_ACCUMULATE_STEPS": "2"}, {"MURI_ACCUMULATE_STEPS": "4"}, {}, {}]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_members_script_splits_as_the_scheduler_chose(launcher: Launcher, isolation: str) -> None:
    launcher.runtime("7", options=("--accumulate-steps", "7=4", "--isolation", isolation))
    assert ends(launcher.member("7", launcher.script("import muri; print(muri.accumulate().steps)"))) == 0
    assert launcher.out("7") == "4\n"


def test_a_dry_run_tells_that_a_script_can_be_split(launcher: Launcher) -> None:
    script = launcher.script("""
        import muri, sys
        accumulate = muri.accumulate() if "can" in sys.argv else None
        for _ in muri.batches(range(1000)):
            with muri.stage("propagate"):
                sum(range(1000))
    """)
    for argument, told in (("can", True), ("no", None)):
        code, result = launcher.dry_run("20:5", script, argument)
        assert (code, result.get("accumulates")) == (0, told), launcher.err(None)
