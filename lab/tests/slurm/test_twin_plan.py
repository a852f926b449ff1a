"""The same snapshot gives the same plan, byte for byte: from the controller on a real Slurm, and in the twin."""

import json
from pathlib import Path

from muri_cluster import MuriCluster

from muri.profiler.exchange import from_json
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import load_config
from muri.slurm_plugin.planning.actions import render_action
from muri.slurm_plugin.records.cluster import Snapshot, dump_snapshot, parse_snapshot
from muri_lab.twin.site import Site, plain_nodes
from muri_lab.twin.twin import Twin
from sandbox.driver import Driver

LIVE = """
import json
from muri.slurm_plugin.controller.assemble import open_controller, read_config
from muri.slurm_plugin.planning.actions import render_action
from muri.slurm_plugin.records.cluster import dump_snapshot

with open_controller(read_config(None)) as controller:
    decision = controller.decision()
actions = [render_action(action) for action in (*decision.repairs, *decision.actions)]
print(json.dumps([dump_snapshot(decision.view.snapshot), json.dumps(actions)]))
"""


def test_the_twin_plans_as_the_live_controller_does(one_gpu: Driver, tmp_path: Path) -> None:
    cluster = MuriCluster(one_gpu)
    cluster.know_profiles()
    for number, kind in enumerate(("load", "propagate", "preprocess", "synchronize", "load", "propagate")):
        cluster.submit(kind, iterations=20 + 10 * number)
    text, actions = json.loads(cluster.python(LIVE).stdout.splitlines()[-1])
    snapshot = parse_snapshot(text)
    assert "StartGroup" in actions

    config = tmp_path / "muri.yaml"
    config.write_text(one_gpu.read("/etc/muri/muri.yaml"))
    twin = Twin(Site(plain_nodes(1, 1)), load_config(config), tmp_path)
    twin.config.state_dir.mkdir(mode=0o700)
    store = ProfileStore(twin.config.state_dir / "profiles.db")
    for profile in from_json(cluster.profile("export"), "the live controller"):
        store.put(profile)
    store.close()

    def frozen() -> Snapshot:
        return snapshot

    twin.gateway.snapshot = frozen  # type: ignore[method-assign]
    twin.gateway.gpu_removal = lambda *_: snapshot.gpu_removal  # type: ignore[method-assign]
    with twin.controller() as controller:
        decision = controller.decision()
    assert dump_snapshot(decision.view.snapshot) == text
    mine = [render_action(action) for action in (*decision.repairs, *decision.actions)]
    assert json.dumps(mine) == actions
