"""Micro-batches train as whole batches do: `muri.accumulate`."""

from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import muri
from muri.launcher.script.accumulate import UnsplittableError, cut, sample_count, sizes_of

SAMPLES = 44  # batches of 12, the last one of 8
CLASSES = 3


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other on a busy machine cost more than these sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def data():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    return TensorDataset(inputs, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


def mlp():
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, CLASSES))


def cnn():
    first = nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU()
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(96, CLASSES))


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def made(make, optimizer):
    torch.manual_seed(1)
    model = make().double()
    return model, OPTIMIZERS[optimizer](model.parameters())


def loader():
    return DataLoader(data(), batch_size=12)


def train_explicitly(make, optimizer, steps):
    model, stepper = made(make, optimizer)
    accumulate = muri.accumulate(steps)
    curve = []
    for _ in range(3):
        for batch in loader():
            stepper.zero_grad()
            for inputs, targets in accumulate(batch):
                accumulate.backward(functional.cross_entropy(model(inputs.double()), targets))
            stepper.step()
            curve.append(accumulate.loss.item())
    return curve


WAYS = pytest.mark.parametrize(
    ("make", "optimizer", "steps"), [(mlp, "adamw", 2), (cnn, "momentum", 4), (mlp, "momentum", 5)]
)


@WAYS
def test_the_loss_curve_is_the_whole_batchs(make, optimizer, steps):
    whole = train_explicitly(make, optimizer, 1)
    assert train_explicitly(make, optimizer, steps) == pytest.approx(whole, rel=1e-9)
    assert len(set(whole)) == len(whole)  # it does train


def saved_at_once(steps):
    """Most bytes that autograd keeps for backward at a time."""
    held, most = {}, [0]
    model, stepper = made(mlp, "momentum")
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    class Kept:
        def __init__(self, tensor):
            self.tensor = tensor
            if tensor.data_ptr() not in parameters:
                held[id(self)] = tensor.numel() * tensor.element_size()
                most[0] = max(most[0], sum(held.values()))

        def __del__(self):
            held.pop(id(self), None)

    accumulate = muri.accumulate(steps)
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        for batch in DataLoader(data(), batch_size=32):
            stepper.zero_grad()
            for inputs, targets in accumulate(batch):
                accumulate.backward(functional.cross_entropy(model(inputs.double()), targets))
            stepper.step()
    return most[0]


def test_less_is_kept_for_backward():
    whole, quarter = saved_at_once(1), saved_at_once(4)
    assert quarter <= 0.3 * whole


def test_how_batches_are_cut():
    pair = namedtuple("pair", "x y")
    batch = {"a": torch.arange(5), "b": [torch.zeros(5, 2), "kept"], "n": ["p", "q", "r", "s", "t"], "k": 3}
    assert sample_count(batch) == 5
    part = cut(batch, 3, 5, 5)
    assert part["a"].tolist() == [3, 4] and part["b"][0].shape == (2, 2) and part["b"][1] == "kept"
    assert part["n"] == ["s", "t"] and part["k"] == 3
    half = cut(pair(torch.arange(4), torch.tensor(7)), 0, 2, 4)
    assert (half.x.tolist(), half.y.item()) == ([0, 1], 7)
    assert isinstance(cut(UserDict(x=torch.arange(4)), 0, 1, 4), UserDict)
    assert [sizes_of(7, 3), sizes_of(2, 4), sizes_of(0, 3)] == [[3, 2, 2], [1, 1], [0]]
    with pytest.raises(UnsplittableError, match=r"found: 2, 3"):
        sample_count([torch.zeros(2), torch.zeros(3)])


def test_without_a_number_the_scheduler_chooses(monkeypatch):
    monkeypatch.delenv("MURI_ACCUMULATE_STEPS", raising=False)
    assert muri.accumulate().steps == 1
    monkeypatch.setenv("MURI_ACCUMULATE_STEPS", "8")
    assert muri.accumulate().steps == 8
    assert muri.accumulate(3).steps == 3
    monkeypatch.setenv("MURI_ACCUMULATE_STEPS", "many")
    assert muri.accumulate().steps == 1  # a broken number costs the parts, not the run


def test_the_way_around_a_loop_is_gone():
    with pytest.raises(ValueError, match=r"removed in 0\.3: .*for part in accumulate"), muri.accumulate(2):
        pass
