"""Fetching in the script's own process: where a fetch lets others go first, and a loader's own report."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

import muri
from muri.launcher.job.stage_clock import StageClock
from muri.launcher.script import data_loading, script_clock


class OneByOne:
    def __init__(self, told):
        self.told = told

    def __getitem__(self, index):
        self.told.append(index)
        return index


class AtOnce(OneByOne):
    def __getitems__(self, indices):
        self.told.append(list(indices))
        return list(indices)


@pytest.fixture
def told(monkeypatch):
    """What happens in order: samples read, and offers to yield."""
    events = []
    monkeypatch.setattr(data_loading, "offer_to_yield", lambda hook: events.append("yield"))
    return events


def read(dataset, indices):
    fetcher = _MapDatasetFetcher(dataset, True, list, False)
    data_loading._lend_yield_points(fetcher)
    return fetcher.fetch(indices)


def test_yield_points_lie_between_samples_also_in_a_subset_but_not_in_a_batch_that_is_read_at_once(told):
    assert read(OneByOne(told), [3, 1]) == [3, 1]
    assert told == ["yield", 3, "yield", 1]
    told.clear()
    assert read(Subset(Subset(OneByOne(told), [9, 8, 7]), [2, 1]), [0, 1]) == [7, 8]
    assert told == ["yield", 7, "yield", 8]
    told.clear()
    assert read(Subset(AtOnce(told), [9, 8, 7]), [2, 1]) == [7, 8]
    assert told == [[7, 8]]


def test_a_loader_says_how_far_it_works_ahead(monkeypatch):
    heard, clock = [], StageClock()
    clock.report_prefetch_depth(DataLoader([1], num_workers=2))  # no listener
    clock.on_prefetch_depth = lambda depth, period: heard.append((depth, period))
    clock.report_prefetch_depth(DataLoader([1], num_workers=2))
    clock.report_prefetch_depth(DataLoader([1], num_workers=2, prefetch_factor=5))
    clock.report_prefetch_depth(DataLoader([1]))
    clock.report_prefetch_depth(range(3))
    assert heard == [(4, 2), (10, 2), (0, 1), (0, 1)]
    heard.clear()
    monkeypatch.setattr(script_clock._provider, "current", lambda: clock)
    assert list(muri.batches([torch.zeros(1)], prefetch=1)) == [torch.zeros(1)]
    assert heard == [(1, 1)]
