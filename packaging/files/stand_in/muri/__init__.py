"""Stands in for Muri where it has been removed, so that scripts which mark their stages run on, alone."""

import sys
from contextlib import nullcontext

__all__ = ["Resumed", "accumulate", "batches", "cache", "checkpoint", "should_stop", "stage", "step", "yield_point"]


def stage(name):
    """Nothing shares this job's resources."""
    return nullcontext()


def batches(loader, *, prefetch=0):
    """The loader itself."""
    return loader


def yield_point():
    """Return at once: no other job waits."""


def step():
    """Count nothing."""


def cache(dataset, *, gib):
    """The dataset itself."""
    return dataset


def should_stop():
    """Return False: this job is not asked to stop."""
    return False


class Resumed:
    """A fresh start."""

    resumed = False
    iteration = epoch = 0
    path = None


def checkpoint(save, load, *, every_s=None, every_iterations=None):
    """Say that no checkpoint is loaded or saved."""
    print("muri: Muri has been removed from this host: no checkpoint is loaded or saved", file=sys.stderr)
    return Resumed()


class accumulate:
    """Each batch in one part."""

    def __init__(self, steps=None):
        self.steps, self.share, self.loss = 1, 1.0, None

    def __call__(self, batch):
        yield batch

    def backward(self, loss):
        loss.backward()
        self.loss = loss.detach()
