"""Scripts that are not safe in a thread are given up before they train; their jobs go back to the queue."""

import re

import pytest
from launcher_harness import Launcher, ends

AGAIN = {"MURI_REQUEUE_WAIT_S": "0.1"}

WORKERS = """
    import torch
    from torch.utils.data import DataLoader
    model = torch.nn.Linear(1, 1)
    for batch in DataLoader(torch.ones(8, 1), num_workers=2):
        print("trains", flush=True)
"""
COMPILES = """
    import torch
    model = torch.compile(torch.nn.Linear(1, 1))
    print("trains", flush=True)
"""
RANKED = """
    import os, torch
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo")
    print("trains", flush=True)
"""
CATCHES_ALL = """
    try:
        import accelerate
    except BaseException:
        pass
    while True:
        print("trains", flush=True)
"""
IN_A_THREAD = """
    import multiprocessing, threading, time
    def work():
        multiprocessing.get_context("spawn").Process(target=print).start()
        print("trains", flush=True)
    threading.Thread(target=work).start()
    time.sleep(1000)
"""
PLAIN = "import resource\nprint(resource.getrlimit(resource.RLIMIT_NOFILE) is not None, flush=True)\n"


SWITCHES = (
    "torch.use_deterministic_algorithms(True)",
    "torch.backends.cudnn.benchmark = True",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.set_float32_matmul_precision('high')",
    "torch.autograd.set_detect_anomaly(True)",
    "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH).__enter__()",
)
USES = (
    "logging.captureWarnings(True)",
    "logging.disable(logging.ERROR)",
    "multiprocessing.set_start_method('spawn')",
    "numpy.random.set_bit_generator(None)",
    "os.kill(os.getpid(), 15)",
    "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "signal.raise_signal(signal.SIGTERM)",
    "signal.setitimer(signal.ITIMER_REAL, 9)",
    "signal.signal(signal.SIGTERM, print)",
    "socket.setdefaulttimeout(9)",
    "sys.excepthook = print",
    "sys.setrecursionlimit(9999)",
    "torch.set_default_dtype(torch.float64)",
    "torch.set_default_tensor_type('torch.FloatTensor')",
    "torch.set_num_interop_threads(1)",
    "warnings.formatwarning = print",
)
SUBPROCESSES = (
    "os.system('true')",
    "os.popen('true')",
    "os.execlp('true', 'true')",
    "os.posix_spawnp('true', ['true'], os.environ)",
    "subprocess.run(['true'])",
    "multiprocessing.resource_tracker.ensure_running()",
)
DANGERS = {
    **{
        f"import multiprocessing.resource_tracker, os, subprocess\n{use}\nprint('trains')\n": "subprocesses"
        for use in SUBPROCESSES
    },
    **{f"import torch, torch.nn.attention\n{use}\nprint('trains')\n": "switches of PyTorch" for use in SWITCHES},
    **{f"import {use.partition('.')[0]}\n{use}\nprint('trains')\n": re.split(r"\(| =", use)[0] for use in USES},
    WORKERS: "worker processes",
    COMPILES: "torch.compile",
    RANKED: "torch.distributed.init_process_group",
    IN_A_THREAD: "worker processes",
    "import os\nos.fork()\nprint('trains')\n": "forked processes",
}


def test_what_is_not_safe_in_a_thread_returns_to_the_queue_before_it_trains(launcher: Launcher) -> None:
    pytest.importorskip("torch", reason="some of the dangers are PyTorch's")
    jobs = {str(101 + number): text for number, text in enumerate(DANGERS)}
    launcher.threads(*jobs, "200")
    members = {job: launcher.member(job, launcher.script(text, f"{job}.py"), **AGAIN) for job, text in jobs.items()}
    for job, text in jobs.items():
        assert ends(members[job]) == 75, text
        assert launcher.out(job) == ""
        said = f"gave the script up: the script uses {DANGERS[text]}, which is not safe in a thread"
        assert said in launcher.err(job)
    assert launcher.ran("200", launcher.script(PLAIN)) == "True\n"


def test_a_script_that_catches_everything_is_given_up_all_the_same(launcher: Launcher) -> None:
    launcher.script("", "accelerate.py", "site")  # installed, as far as the group is concerned
    launcher.environment["PYTHONPATH"] = str(launcher.folder / "site")
    launcher.threads("101")
    launcher.ran("101", launcher.script(CATCHES_ALL), code=75, PYTHONPATH="", **AGAIN)
    assert "the script uses accelerate, which is not safe in a thread" in launcher.err("101")


def test_the_same_script_trains_in_a_process(launcher: Launcher) -> None:
    launcher.runtime("101")
    script = launcher.script("import os\nos.fork()\nprint('trains', flush=True)")
    assert launcher.ran("101", script) == "trains\ntrains\n"
