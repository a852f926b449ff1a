"""Short scripts whose stage times are known."""

VIRTUAL_TIME = """
    import os, time
    from muri.launcher.script.script_clock import current_clock
    really_sleep, begin_s = time.sleep, time.perf_counter()
    now_s = begin_s
    def sleep(seconds):
        global now_s
        now_s += seconds
        while now_s - begin_s > 0.5 and not os.path.exists("HEARD"):
            really_sleep(0.01)
    time.perf_counter = current_clock().now = lambda: now_s
    time.sleep = sleep
"""
"""The beginning of a script in which time passes only while it sleeps; it goes on after half a second when `HEARD` is
there, a file that says that its first report was read."""

SLEEPS = """
    import time, muri
    def batches():
        for step in range(400):
            time.sleep(0.2 if step < 2 else 0.02)
            yield step
    for batch in muri.batches(batches(), prefetch=PREFETCH):
        with muri.stage("propagate"):
            time.sleep(0.01)
    print("the end")
"""

FAILS = """
    import muri
    for step in range(4):
        with muri.stage("load"): pass
        with muri.stage("propagate"): pass
    raise ValueError("no such dataset: cats")
"""

UNMARKED = """
    import torch, muri
    torch.set_num_threads(1)
    layer = torch.nn.Linear(64, 64)
    for batch in muri.batches(range(400)):
        inputs = torch.randn(64, 64)
        for _ in range(200):
            inputs = (inputs.sin() + inputs.cos()).tanh()
        with muri.stage("propagate"):
            layer(inputs).sum().backward()
"""

WORKERS = """
    import multiprocessing, time, torch
    from torch.utils.data import DataLoader, Dataset
    torch.set_num_threads(1)
    done = multiprocessing.Value("i", 0)
    def augment(sample):
        time.sleep(0.02)
        return sample
    class Samples(Dataset):
        def __init__(self): self.transform = augment
        def __len__(self): return 400
        def __getitem__(self, index):
            while done.value < index - index % 4: time.sleep(0.001)
            time.sleep(0.04)
            return self.transform(torch.zeros(64))
    model = torch.nn.Linear(64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        for batch in DataLoader(Samples(), num_workers=4):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            done.value += 1
    finally:
        done.value = 400
"""
"""Four workers, none of which begins a batch before the last four are done: a stall leaves no batch ready. At the end
none waits for more, or the script's exit would wait for each."""
