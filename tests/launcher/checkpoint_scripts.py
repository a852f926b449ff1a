"""Training scripts that can be stopped and resumed, and how to read their loss curves."""

from pathlib import Path

TRAIN = """
    import os, random, signal, sys, time
    import numpy as np, torch, muri

    torch.set_num_threads(1)
    torch.manual_seed(3); random.seed(4); np.random.seed(5)
    curve, epochs, stop_at = open(sys.argv[1], "a"), 3, int(sys.argv[2])
    waits_at = int(os.environ.get("WAITS_AT", "0"))
    data = torch.utils.data.TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
    own = torch.Generator().manual_seed(9) if os.environ.get("OWN_GENERATOR") else None
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, generator=own)
    layers = torch.nn.Linear(6, 16), torch.nn.Dropout(0.4), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)

    def save(path):
        torch.save([model.state_dict(), optimizer.state_dict()], path)

    def load(path):
        first, second = torch.load(path)
        model.load_state_dict(first)
        optimizer.load_state_dict(second)

    start = muri.checkpoint(save, load)
    print("started at", start.iteration, flush=True)
    done = start.iteration
    for epoch in range(start.epoch, epochs):
        batches = muri.batches(loader)
        for inputs, targets in batches:
            with muri.stage("propagate"):
                noise = random.random() + np.random.rand()
                loss = ((model(inputs) - targets * noise) ** 2).mean()
                optimizer.zero_grad(); loss.backward(); optimizer.step()
            done += 1
            print(done, loss.item().hex(), file=curve, flush=True)
            if done == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            while done == waits_at and batches.lease.renewed:  # until it is asked to stop
                time.sleep(0.01)
    print("finished", file=curve, flush=True)
"""


def lines(path: Path) -> list[str]:
    """A loss curve: one line per iteration, then "finished"."""
    return path.read_text().splitlines() if path.exists() else []
