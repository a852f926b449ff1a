"""Micro-batches train as whole batches do: `muri.accumulate`, called by the script or through hooks."""

import sys
from collections import UserDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import muri
from muri.launcher.accumulation.splitting import UnsplittableError, cut, sample_count, sizes_of

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


def loss_on_all_data(model):
    """What the weights are worth, whatever the loop saw."""
    inputs, targets = data().tensors
    with torch.no_grad():
        return functional.cross_entropy(model(inputs.double()), targets).item()


def working(loss=functional.cross_entropy, then=lambda model: None):
    """What a plain loop does with a batch: a loss, and something with its gradients before the step."""

    def train_batch(model, stepper, inputs, targets):
        stepper.zero_grad()
        loss(model(inputs), targets).backward()
        then(model)
        stepper.step()

    return train_batch


ordinary = working()


def trained(steps, train_batch=ordinary, *, make=mlp, optimizer="momentum", scheduled=False, loader_of=loader):
    """The loss on all data after two epochs, and how often the schedule stepped; 1 step: without Muri."""
    model, stepper = made(make, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(stepper, 3, gamma=0.5) if scheduled else None
    with muri.accumulate(steps) if steps > 1 else nullcontext():
        for _ in range(2):
            for inputs, targets in loader_of():
                train_batch(model, stepper, inputs.double(), targets)
                if schedule is not None:
                    schedule.step()
    return loss_on_all_data(model), schedule and schedule.last_epoch


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


@WAYS
def test_hooks_train_an_unchanged_loop_alike(make, optimizer, steps, capfd):
    whole, schedules = trained(1, make=make, optimizer=optimizer, scheduled=True)
    split = trained(steps, make=make, optimizer=optimizer, scheduled=True)
    assert split == (pytest.approx(whole, rel=1e-9), schedules) == (split[0], 8)
    assert not capfd.readouterr().err


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clearing_after_the_step(model, stepper, inputs, targets):
    functional.cross_entropy(model(inputs), targets).backward()
    stepper.step()
    model.zero_grad()


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
SPLIT_ALIKE = {
    "clipped": working(then=clip),
    "cleared through the model": clearing_after_the_step,
    "smooth": working(lambda o, t: functional.cross_entropy(o, t, label_smoothing=0.1)),
    "weighted": working(lambda o, t: functional.cross_entropy(o, t, weight=WEIGHTS)),
    "ignoring": working(lambda o, t: functional.cross_entropy(o, torch.where(t == 1, -100, t))),
    "summed": working(lambda o, t: functional.cross_entropy(o, t, reduction="sum")),
    "divided": working(lambda o, t: functional.cross_entropy(o, t, reduction="none").sum() * (1 / len(t))),
    "squares": working(lambda o, t: ((o - t[:, None]) ** 2).sum(1).mean() + functional.mse_loss(o, o.detach() + 1)),
}


@pytest.mark.parametrize("way", SPLIT_ALIKE)
@pytest.mark.parametrize("steps", [3, 4])
def test_loops_of_many_kinds_train_alike(way, steps, capfd):
    whole, _ = trained(1, SPLIT_ALIKE[way])
    assert trained(steps, SPLIT_ALIKE[way])[0] == pytest.approx(whole, rel=1e-9)
    assert not capfd.readouterr().err


def middle(outputs, targets):
    """A function of means over samples: as many values as classes, whatever the batch."""
    return outputs.mean(0).square().sum()


def twice(outputs, targets):
    """Six values, and in two parts six samples in the first one: that the first batch's parts differ shows it."""
    return middle(torch.cat([outputs, outputs], dim=1), targets)


def own_clipping(model):
    for parameter in model.parameters():
        parameter.grad.clamp_(-0.01, 0.01)


def test_two_loaders_of_one_iteration_stay_in_step(capfd):
    pairs = []
    with muri.accumulate(2):
        for (first,), (second,) in zip(
            DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4),
            DataLoader(TensorDataset(torch.arange(12.0)), batch_size=4),
            strict=True,
        ):
            pairs.append((first.tolist(), second.tolist()))
    assert [a for a, b in pairs if a == b] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert "two loaders" in capfd.readouterr().err


def test_evaluation_sees_each_sample_once():
    with muri.accumulate(3), torch.no_grad():
        assert [len(batch) for (batch,) in DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)] == [4, 4, 2]
    with muri.accumulate(2):  # without no_grad it shows when nothing is trained on the first part
        sizes = [len(batch) for (batch,) in DataLoader(TensorDataset(torch.zeros(10)), batch_size=4)]
    assert sizes == [2, 2, 4, 2]


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

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor), muri.accumulate(steps):
        for inputs, targets in DataLoader(data(), batch_size=32):
            ordinary(model, stepper, inputs.double(), targets)
    return most[0]


def test_less_is_kept_for_backward():
    whole, quarter = saved_at_once(1), saved_at_once(4)
    assert quarter <= 0.3 * whole


def test_batch_normalization_is_warned_of(capfd):
    def normalizing():
        return nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    trained(2, make=normalizing)
    assert capfd.readouterr().err.count("batch normalization") == 1


def test_leaving_the_loop_in_the_middle_of_a_batch_is_told(capfd):
    model, stepper = made(mlp, "momentum")
    with muri.accumulate(4):
        for number, (inputs, targets) in enumerate(loader()):
            ordinary(model, stepper, inputs.double(), targets)
            if number == 5:
                break
    assert "left in the middle of a batch" in capfd.readouterr().err
    assert not any(parameter.grad.any() for parameter in model.parameters())


def test_hooks_are_taken_out_again():
    def places():
        return (
            torch.utils.data.dataloader._BaseDataLoaderIter.__next__,
            torch.autograd.backward,
            nn.Module.zero_grad,
            torch.optim.AdamW.step,
            torch.optim.lr_scheduler.LRScheduler.step,
            nn.utils.clip_grad_norm_,
        )

    made(mlp, "adamw")
    before = places()
    with pytest.raises(RuntimeError, match="own"), muri.accumulate(2):
        assert all(new is not old for new, old in zip(places(), before, strict=True))
        raise RuntimeError("own")
    assert places() == before


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


def test_a_loader_of_odd_things_is_left_alone(capfd):
    class Odd(TensorDataset):
        shape, ndim = (2,), 1

        def __len__(self):
            return 4

        def __getitem__(self, index):
            if isinstance(index, slice):
                raise TypeError("one at a time")
            return index

    with muri.accumulate(2):
        assert next(iter(DataLoader(Odd(), batch_size=None, collate_fn=lambda _: Odd()))).shape == (2,)
    assert "a batch cannot be cut" in capfd.readouterr().err


def test_without_a_number_the_scheduler_chooses(monkeypatch):
    monkeypatch.delenv("MURI_ACCUMULATE", raising=False)
    monkeypatch.delenv("MURI_ACCUMULATE_STEPS", raising=False)
    assert muri.accumulate().steps == 1
    monkeypatch.setenv("MURI_ACCUMULATE", "2")
    assert muri.accumulate().steps == 2
    monkeypatch.setenv("MURI_ACCUMULATE_STEPS", "8")
    assert muri.accumulate().steps == 8
    assert muri.accumulate(3).steps == 3
    monkeypatch.setenv("MURI_ACCUMULATE_STEPS", "many")
    assert muri.accumulate().steps == 2  # a broken number costs the parts, not the run


def test_a_gradient_scaler_steps_once_per_batch():
    def loss_with(steps):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

        def train_batch(model, stepper, inputs, targets):
            stepper.zero_grad()
            scaler.scale(functional.cross_entropy(model(inputs), targets)).backward()
            scaler.unscale_(stepper)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(stepper)
            scaler.update()

        return trained(steps, train_batch)[0], scaler.get_scale()

    whole, split = loss_with(1), loss_with(4)
    assert split == pytest.approx(whole, rel=1e-9)
    assert whole[1] == 1024.0 * 2**4  # 8 batches


def closures(model, stepper, inputs, targets):
    def closure():
        stepper.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return loss

    assert stepper.step(closure).item() > 0


def turns(model, stepper, inputs, targets):
    """As a GAN does: a second step that rests on the first."""
    for _ in range(2):
        ordinary(model, stepper, inputs, targets)


def by_hand(model, stepper, inputs, targets):
    for parameter in model.parameters():
        parameter.grad = None
    functional.cross_entropy(model(inputs), targets).backward()
    stepper.step()


def without_backward(model, stepper, inputs, targets):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), targets), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    stepper.step()


@pytest.mark.parametrize(
    ("train_batch", "reason"),
    [
        (closures, "takes a closure"),
        (turns, "several backward passes"),
        (by_hand, "changes or clears gradients"),
        (without_backward, "do not come from backward()"),
        (working(then=own_clipping), "changes or clears gradients"),
        (working(lambda o, t: functional.cross_entropy(o, t).sqrt()), "SqrtBackward0"),
        (working(lambda o, _: o[:3].square().mean()), "is none over"),
        (working(middle), "is no sum over"),
        (working(twice), "no mean or sum over its samples"),
        (working(lambda o, t: functional.cross_entropy(o, t, reduction="sum") / 7), "divides a sum by 7"),
    ],
)
@pytest.mark.parametrize("steps", [2, 4])
def test_loops_that_cannot_be_split_train_on_whole_batches_and_say_why(train_batch, reason, steps, capfd):
    assert trained(steps, train_batch, scheduled=True) == trained(1, train_batch, scheduled=True)
    err = capfd.readouterr().err
    assert (err.count("batches are not split"), err.count(reason)) == (1, 1)


def test_a_script_that_accumulates_itself_is_left_alone(capfd):
    model, stepper = made(mlp, "momentum")
    with muri.accumulate(3):
        for number, (inputs, targets) in enumerate(loader(), 1):
            functional.cross_entropy(model(inputs.double()), targets).backward()
            if number % 2 == 0:
                stepper.step()
                stepper.zero_grad()
    assert "accumulates gradients over several batches itself" in capfd.readouterr().err
    # the part before the refusal counted as an iteration of the script's own
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_loaders_with_workers_are_split_as_well():
    whole, _ = trained(1)
    split, _ = trained(3, loader_of=lambda: DataLoader(data(), batch_size=12, num_workers=1))
    assert split == pytest.approx(whole, rel=1e-9)


def test_trainers_that_fetch_ahead_get_whole_batches(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "accelerate.data_loader", object())
    assert trained(4) == trained(1)
    assert "fetch batches ahead" in capfd.readouterr().err


def test_prefetching_gets_whole_batches(capfd):
    sizes = []
    with muri.accumulate(4):
        for inputs, _ in muri.batches(loader(), prefetch=1):
            sizes.append(len(inputs))
    assert sizes == [12, 12, 12, 8]
    assert "fetches batches ahead" in capfd.readouterr().err


def test_a_loader_that_another_thread_goes_on_reading_is_let_go(capfd):
    model, stepper = made(mlp, "momentum")
    with muri.accumulate(2):
        iterator = iter(loader())
        first = next(iterator)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(next, iterator).result()
        assert (len(first[0]), len(second[0])) == (6, 12)
        before = loss_on_all_data(model)
        ordinary(model, stepper, second[0].double(), second[1])
    assert loss_on_all_data(model) != before
    assert "several threads" in capfd.readouterr().err
