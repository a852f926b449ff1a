"""What scripts set for Python and PyTorch counts for them alone. Two members run the same script at once."""

import pytest
from two_members import run_both


def test_logging_and_warnings(launcher):
    run_both(
        launcher,
        """
import logging, warnings
assert not logging.root.handlers
logging.basicConfig(level=logging.DEBUG if me == "101" else logging.ERROR, format=me + " %(message)s")
warnings.simplefilter("error" if me == "101" else "ignore")
log = logging.getLogger("train"); log.addHandler(logging.FileHandler(f"train-{me}.log"))
meet("configured")
log.debug("debug"); log.error("error")
try:
    warnings.warn("careful"); print("ignored")
except UserWarning:
    print("raised")
meet("done")
""",
    )
    assert (launcher.out("101"), launcher.out("102")) == ("raised\n", "ignored\n")
    assert launcher.err("101") == "101 debug\n101 error\n" and launcher.err("102") == "102 error\n"
    assert (launcher.folder / "train-102.log").read_text() in {"debug\nerror\n", "error\n"}
    assert (launcher.folder / "train-101.log").read_text() == "debug\nerror\n"


def test_settings_of_the_interpreter(launcher):
    outputs = run_both(
        launcher,
        """
import gc, tempfile
gc.disable()
tempfile.tempdir = os.getcwd() + "/" + me
meet("set")
print(gc.isenabled(), os.path.basename(tempfile.gettempdir()))
meet("read")
""",
    )
    assert outputs == ("False 101\n", "False 102\n")


def test_settings_of_pytorch(launcher):
    pytest.importorskip("torch", reason="the settings are PyTorch's")
    run_both(
        launcher,
        """
import copy, threading, torch, muri
first = me == "101"
torch.set_num_threads(1 if first else 2)
torch.use_deterministic_algorithms(False)
torch.backends.cudnn.benchmark = False
torch.set_float32_matmul_precision("highest")
torch.set_printoptions(precision=2 if first else 6)
torch.autograd.set_detect_anomaly(False)
meet("set")
def show():
    print(torch.get_num_threads(), torch.tensor(1 / 3), torch.is_grad_enabled())
with torch.no_grad():
    with muri.stage("propagate"):
        show()
    thread = threading.Thread(target=show); thread.start(); thread.join()
with torch.device("meta"):
    print(torch.ones(1).device)
kept = copy.copy(torch._tensor_str.PRINT_OPTS)
if hasattr(torch._tensor_str, "printoptions"):  # not in every release
    with torch._tensor_str.printoptions(precision=4):
        print(torch.tensor(1 / 3), torch._tensor_str.get_printoptions()["precision"], kept.precision)
else:
    print("tensor(0.3333) 4", kept.precision)
print(torch.tensor(1 / 3))
meet("read")
""",
    )
    for job, shown, precision, third in (
        ("101", "1 tensor(0.33)", 2, "0.33"),
        ("102", "2 tensor(0.333333)", 6, "0.333333"),
    ):
        assert launcher.out(job).splitlines() == [
            f"{shown} False",
            f"{shown} True",
            "meta",
            f"tensor(0.3333) 4 {precision}",
            f"tensor({third})",
        ]


def test_what_a_package_registers_at_its_import_outlives_the_session(launcher):
    text = "import atexit\natexit.register(print, 'package ended')\n"
    launcher.environment["PYTHONPATH"] = str(launcher.script(text, "registering.py", "site").parent)
    script = launcher.script("""
        import atexit, registering, tempfile, weakref
        atexit.register(print, "script ended")
        class Model: pass
        model = Model(); weakref.finalize(model, print, "finalized")
    """)
    launcher.threads("101")
    assert launcher.ran("101", script, PYTHONPATH="") == "script ended\nfinalized\n"


def test_modules_of_the_same_name(launcher):
    pytest.importorskip("torch", reason="the workers are a DataLoader's")
    for member in ("101", "102"):
        launcher.script("from .names import OWNER\nclass Sample: owner = OWNER\n", "__init__.py", f"{member}/utils")
        launcher.script(f"OWNER = '{member}'\n", "names.py", f"{member}/utils")
        launcher.script("from utils.names import OWNER as VALUE\n", "lazy.py", member)
    code = """
        import importlib, pickle, threading, utils
        from torch.utils.data import DataLoader, Dataset
        class Lazy(Dataset):
            def __len__(self): return 4
            def __getitem__(self, index):
                import lazy
                return lazy.VALUE
        found = []
        meet("imported")
        def look():
            import lazy
            found.append(lazy.VALUE)
        for _ in range(20):
            thread = threading.Thread(target=look); thread.start(); thread.join(); look()
            found.append(pickle.loads(pickle.dumps(utils.Sample())).owner)
            found.append(importlib.reload(utils).OWNER)
            found.append(importlib.import_module("utils.names").OWNER)
        found += [value for batch in DataLoader(Lazy()) for value in batch]
        print(set(found), len(found))
    """
    assert run_both(launcher, code, own_folders=True) == ("{'101'} 104\n", "{'102'} 104\n")
