"""A dry run reports scripts that threads of one process could not keep apart."""

import textwrap
import time

import pytest
from launcher_harness import Launcher

from muri.launcher.shared_process.danger_watch import LEAST_LOOKS, MOST_HELD, LockWatch

LOOP = """
import muri
for _ in muri.batches(range(1000)):
    with muri.stage("propagate"):
        work()
"""
REST = """
import time
def work():
    time.sleep(0.001)
"""
COMPUTES = """
def work():
    sum(range(50_000))
"""
USES = [
    ("accelerate", "import accelerate"),
    ("children", "import os\nif not os.fork(): os._exit(0)"),
    ("children", "import subprocess\nsubprocess.run(['true'])"),
    ("children", "import multiprocessing as m\nm.get_context('spawn').Process(target=print).start()"),
    ("children", "import torch.utils.data as d\nloader_for_later = d.DataLoader([1], num_workers=1)"),
    ("compile", "import torch\ntorch.nn.Linear(1, 1).compile()"),
    ("environment", "import os\nos.environ['OF_THE_SCRIPT'] = '1'"),
    ("environment", "import os\nos.putenv('OF_THE_SCRIPT', '1')"),
    ("environment", "import os\nos.unsetenv('OF_THE_SCRIPT')"),
    ("children", "import multiprocessing as m\nm.set_start_method('spawn')"),
    ("packages", "import pluggy"),
    ("native", "import ctypes\nctypes.CDLL(None)"),
    ("patches", "import sys\nsys.excepthook = lambda *_: None"),
    ("patches", "import torch\ntorch.manual_seed = lambda seed: None"),
    ("paths", "import sys\nsys.path.append('/nowhere')"),
    ("ranks", "import torch.distributed as d\nd.init_process_group('gloo', 'file://STORE', world_size=1, rank=0)"),
    ("settings", "import os\nos.nice(1)"),
    ("settings", "import logging\nlogging.disable(logging.ERROR)"),
    ("settings", "import torch\ntorch.set_default_dtype(torch.float64)"),
    ("settings", "import torch\ntorch.set_default_tensor_type(torch.DoubleTensor)"),
    ("settings", "import torch\ntorch.set_num_interop_threads(1)"),
    ("settings", "import torch\ntorch.backends.cudnn.benchmark = True"),
    ("settings", "import torch\ntorch.use_deterministic_algorithms(True)\ntorch.use_deterministic_algorithms(False)"),
    ("settings", "import torch\ntorch.autograd.set_detect_anomaly(True)"),
    ("settings", "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, r.getrlimit(r.RLIMIT_NOFILE))"),
    ("signals", "import signal\nsignal.signal(signal.SIGUSR1, print)"),
    ("signals", "import os\nos.kill(os.getpid(), 0)"),
    ("signals", "import signal\nsignal.alarm(1000)"),
    ("threads", "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.submit(print)"),
]


def dangers(launcher: Launcher, text: str, limits: str = "8:2") -> set[str]:
    """Return the report of a script's dry run."""
    code, result = launcher.dry_run(limits, launcher.script(text))
    assert code == 0, launcher.err(None)
    return set(result["detail"]["dangers"])


@pytest.mark.parametrize(("danger", "use"), USES)
def test_a_danger_is_seen_by_its_own_name(launcher: Launcher, danger: str, use: str) -> None:
    launcher.script("", "accelerate.py")  # its import takes seconds
    text = use.replace("STORE", str(launcher.folder / "store")) + "\n" + REST + LOOP
    found = dangers(launcher, "if __name__ == '__main__':\n" + textwrap.indent(text, "    "))
    assert found == {danger, "interpreter"}  # the loop is too short to tell of the interpreter's lock


def test_an_ordinary_loop_is_no_danger_but_for_its_length(launcher: Launcher) -> None:
    launcher.script("LAYERS = 2", "own_module.py")
    text = """
        import ctypes, torch, own_module
        from torch.utils.data import DataLoader, TensorDataset
        torch.manual_seed(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(own_module.LAYERS)))
        optimizer = torch.optim.Adam(model.parameters())
        loader = DataLoader(TensorDataset(torch.ones(4000, 8)), batch_size=8, shuffle=True)
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    """
    assert dangers(launcher, text, "8:2") == {"interpreter"}  # too short to tell


def test_a_package_that_pytorch_imports_at_its_end_is_no_danger(launcher: Launcher) -> None:
    launcher.script("", "tabulate.py")
    script = launcher.script("import tabulate" + REST + LOOP, folder="own")
    _, result = launcher.dry_run("8:2", script, PYTHONPATH=str(launcher.folder))
    assert result["detail"]["dangers"] == ["interpreter"]


def test_a_loop_that_waits_is_no_danger(launcher: Launcher) -> None:
    rests = """
        import threading
        never_set = threading.Event()
        def work():
            never_set.wait(0.5)
    """
    assert dangers(launcher, textwrap.dedent(rests) + LOOP, "4:1") == set()


def test_a_script_that_computes_in_python_and_one_too_short_to_tell(launcher: Launcher) -> None:
    assert dangers(launcher, COMPUTES + LOOP, "400:2") == {"interpreter"}
    assert dangers(launcher, REST + LOOP, "4:1") == {"interpreter"}


@pytest.mark.parametrize("computes", [True, False])
def test_the_lock_is_found_held_while_python_computes_and_free_while_it_waits(computes: bool) -> None:
    watch = LockWatch()
    while True:
        share, looks = watch.share, watch._looks  # in this order, as the watch looks on meanwhile
        if looks >= LEAST_LOOKS:
            break
        assert share is None
        if computes:
            sum(range(10_000))
        else:
            time.sleep(0.5)
    watch.stop()
    assert watch.share is not None
    assert (watch.share > MOST_HELD) == computes
