"""`muri profile bandwidth`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import click

from muri.profiler.allreduce import (
    AllReduceError,
    Timing,
    fit,
    measure_on_this_node,
    step_of,
    time_all_reduce,
    usable_backend,
)
from muri.profiler.bandwidth import KIND, Bandwidth, bandwidths, ring_s
from muri.profiler.commands.options import json_option, open_if_any, open_store, store_option
from muri.profiler.times import now_text


@click.command("bandwidth", short_help="Measure the all-reduce that scaled profiles rest on.")
@click.option("--ranks", type=click.IntRange(2, 64), default=2, show_default=True, help="Processes, one per GPU.")
@click.option("--backend", type=click.Choice(("auto", "gloo", "nccl")), default="auto", show_default=True)
@click.option("--gpu-type", default="gpu", show_default=True, help="Slurm's type of the GPUs, as profiles have it.")
@click.option("--list", "list_only", is_flag=True, help="Measure nothing; show what was measured.")
@store_option
@json_option
def bandwidth_command(
    *, ranks: int, backend: str, gpu_type: str, list_only: bool, store_path: Path | None, as_json: bool
) -> None:
    """Measure an all-reduce and store its bandwidth and latency, for `muri profile predict`.

    Between --ranks processes on this node or, started by srun with several tasks, between these.

    \b
    Examples:
      muri profile bandwidth --ranks 4 --gpu-type a100
      srun -N 2 --ntasks-per-node 4 --gres gpu:4 \\
        muri profile bandwidth --gpu-type a100
      muri profile bandwidth --list
    """
    if list_only:
        _print(_measured(store_path), as_json)
        return
    step = step_of(os.environ)
    backend = usable_backend(backend, ranks if step is None else step.ranks // step.nodes)
    if step is None:
        click.echo(f"measuring between {ranks} processes with {backend} …", err=True)
        timings, nodes = measure_on_this_node(ranks, backend), 1
    else:
        timings, ranks, nodes = time_all_reduce(*step.meeting(backend)), step.ranks, step.nodes
        if step.rank:
            return
    found = _bandwidth(timings, gpu_type, ranks, nodes, backend)
    with open_store(store_path) as store:
        store.put_document(KIND, found.to_document())
    _print((found,), as_json)
    if not as_json:
        _print_timings(found, timings)


def _measured(store_path: Path | None) -> tuple[Bandwidth, ...]:
    store = open_if_any(store_path)
    if store is None:
        return ()
    with store:
        return bandwidths(store)


def _bandwidth(timings: Sequence[Timing], gpu_type: str, ranks: int, nodes: int, backend: str) -> Bandwidth:
    if ranks % nodes:
        raise AllReduceError(f"{ranks} tasks on {nodes} nodes: give every node as many (srun --ntasks-per-node)")
    now = now_text()
    return Bandwidth(gpu_type, nodes, ranks // nodes, *fit(timings, ranks), backend, now)


def _print(found: Sequence[Bandwidth], as_json: bool) -> None:
    if as_json:
        documents = [{"name": item.name, **item.to_document().body, "measured_at": item.measured_at} for item in found]
        click.echo(json.dumps({"bandwidths": documents}, indent=2))
        return
    for item in found:
        click.echo(
            f"{item.name}: {item.mib_per_s:.0f} MiB/s a link, {item.latency_s * 1e6:.0f} µs a step "
            f"({item.backend}, {item.measured_at})"
        )
    if not found:
        click.echo("No bandwidth was measured yet.")


def _print_timings(found: Bandwidth, timings: Sequence[Timing]) -> None:
    click.echo(f"{'MIB':>10} {'MEASURED':>12} {'RING MODEL':>12}   ms")
    for size_mib, seconds in timings:
        model_s = ring_s(size_mib / found.mib_per_s, found.latency_s, found.ranks)
        click.echo(f"{size_mib:>10.3f} {seconds * 1e3:>12.3f} {model_s * 1e3:>12.3f}")
