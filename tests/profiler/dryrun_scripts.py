"""Short scripts whose stage times are known."""

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

THREADS = """
    import threading, time, muri
    def work():
        while True:
            with muri.stage("load"):
                time.sleep(0.004)
    threading.Thread(target=work, daemon=True).start()
    for batch in muri.batches(range(400)):
        time.sleep(0.01)
        with muri.stage("propagate"):
            time.sleep(0.01)
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
