"""`muri.accumulate` on real processes: DDP ranks, members of a group, dry runs."""

import json
from collections.abc import Callable

import pytest
from launcher_harness import Launcher, ends
from ranks_harness import free_port

from muri.group_spec import GroupSpec, MemberSpec, Place
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
    rank, ranks, exchanges = 0, 1, []
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

    def told(word: str, name: str, **variables: str) -> Callable[[], list[str]]:
        """Start a run; the result waits for its end and returns its losses and the number of its exchanges."""
        launcher.folder = home / name
        launcher.folder.mkdir()
        process = launcher.member(None, script, word, **variables)

        def words() -> list[str]:
            assert ends(process) == 0, (home / name / "solo.err").read_text()
            return (home / name / "solo.out").read_text().rsplit(maxsplit=1)

        return words

    runs = [told("--ddp", rank, RANK=rank, **ranks) for rank in ("0", "1")]
    whole, _ = told("--alone", "alone")()
    for run in runs:
        curve, exchanges = run()
        assert exchanges == "4"
        assert json.loads(curve) == pytest.approx(json.loads(whole), rel=1e-9)


class Scheduler:
    """Has put jobs 102 and 103 into the group of pilot job 900."""

    def place_of(self, job_id: str) -> Place | None:
        return Place("900", MemberSpec(job_id, accumulate_steps=4 if job_id == "102" else 1))


def test_a_member_hears_what_the_scheduler_chose_for_it() -> None:
    members = (MemberSpec(job_id="101", accumulate_steps=2), MemberSpec(job_id="104"))
    group = GroupSpec(members=members, discipline="fair")
    admission = AdmissionControl("900", MemberTable(group), Scheduler)
    assert [admission.refusal(job_id) for job_id in ("101", "102", "103")] == [""] * 3
    chosen = [admission.environment(job_id) for job_id in ("101", "102", "103", "104")]
    assert chosen == [{"MURI_ACCUMULATE_STEPS": "2"}, {"MURI_ACCUMULATE_STEPS": "4"}, {}, {}]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_members_script_splits_as_the_scheduler_chose(launcher: Launcher, isolation: str) -> None:
    launcher.runtime("7", options=("--accumulate-steps", "7=4", "--isolation", isolation))
    assert launcher.ran("7", launcher.script("import muri; print(muri.accumulate().steps)")) == "4\n"


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
