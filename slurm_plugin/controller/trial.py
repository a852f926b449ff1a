"""A tiny group, end to end: two jobs of a user's are submitted with `--muri`, grouped, run beside each other, and end.

It takes the way of every group: the real sbatch, SPANK plugin, job_submit, controller and Slurm. Only what the
controller sees is narrowed to these jobs and one free GPU, so that no other job is touched. Its memory is a directory
that vanishes.
"""

import os
import pwd
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from muri.clock import MACHINE_CLOCK, Clock
from muri.errors import MuriError
from muri.profiler.records import STAGES, ProfileKey, StageProfile
from muri.profiler.store import ProfileStore
from muri.slurm_plugin.config import Config
from muri.slurm_plugin.controller.assemble import open_controller, open_gateway
from muri.slurm_plugin.controller.loop import only_one
from muri.slurm_plugin.execute.interruptible import InterruptibleGateway
from muri.slurm_plugin.node.tiny_training import ITERATION_S, QUICK_S, SLOW_S
from muri.slurm_plugin.private_files import make_private_directory
from muri.slurm_plugin.records import comment_tags as tags
from muri.slurm_plugin.records.cluster import Job, NewJob, Node, Snapshot
from muri.slurm_plugin.records.gate import lease_end_s
from muri.slurm_plugin.records.roles import read_job

DEADLINE_S: Final = 180.0
_EVERY_S: Final = 1.0
_EXIT_CODES: Final = {"load": 0, "propagate": 3}
_TRAINING: Final = "muri.slurm_plugin.node.tiny_training"


class TrialError(MuriError):
    """The group did not come about, or did not end as it should; the text says which step failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A group that worked.

    Attributes:
        node: Where it ran.
        pilot: The pilot job, which held the GPU.
        members: Its members.
        took_s: Seconds from the submission to the last member's end.
    """

    node: str
    pilot: int
    members: tuple[int, ...]
    took_s: float


class _OnlyThese(InterruptibleGateway):
    """Shows a controller some jobs, those that it submits for them, and one free GPU of one node."""

    def __init__(self, config: Config, node: str) -> None:
        super().__init__(open_gateway(config.gateway), threading.Event(), DEADLINE_S)
        self._node = node
        self.jobs: set[int] = set()

    def snapshot(self) -> Snapshot:
        """Read the queue and leave the rest out."""
        found = self._without_others(super().snapshot())
        busy = any(job.state.is_active and job.nodes for job in found.jobs)
        nodes = tuple(replace(node, gpus_allocated=node.gpu_count - (0 if busy else 1)) for node in found.nodes
                      if node.name == self._node)  # fmt: skip
        return replace(found, nodes=nodes)

    def queue(self) -> Snapshot:
        """Read the jobs alone and leave the rest out."""
        return self._without_others(super().queue())

    def _without_others(self, whole: Snapshot) -> Snapshot:
        return replace(whole, jobs=tuple(job for job in whole.jobs if job.job_id in self.jobs or self._is_pilot(job)))

    def _is_pilot(self, job: Job) -> bool:
        pilot = tags.parse_pilot(job.admin_comment)
        return pilot is not None and self.jobs.issuperset(pilot.members)


def try_group(config: Config, user: str, say: Callable[[str], None], clock: Clock = MACHINE_CLOCK) -> Trial:
    """Run a tiny group of a user's.

    Args:
        config: The site's configuration.
        user: Whose jobs they are; root starts them.
        say: Takes a line about each step.
        clock: To wait by.

    Raises:
        TrialError: A step failed.
        AnotherControllerError: A controller is in a cycle; try again in a moment.
        GatewayError: Slurm refused something.
    """
    with only_one(config.state_dir), tempfile.TemporaryDirectory(prefix="muri-trial-") as folder:
        return _Run(_narrowed(config, Path(folder)), user, say, clock).run()


def _narrowed(config: Config, folder: Path) -> Config:
    state = folder / "state"
    changes = {"state_dir": state, "status_dir": folder / "status", "policy": "muri-s", "gate_watch_s": 0.0}
    pilot = config.pilot.model_copy(update={"poll_s": 0.5, "telemetry_s": 1.0, "attach_timeout_s": DEADLINE_S})
    grouping = config.grouping.model_copy(update={"max_group_size": max(2, config.grouping.max_group_size)})
    return config.model_copy(update={**changes, "pilot": pilot, "grouping": grouping})


class _Run:
    """One trial."""

    def __init__(self, config: Config, user: str, say: Callable[[str], None], clock: Clock) -> None:
        self._config = config
        self._user = user
        self._say = say
        self._clock = clock

    def run(self) -> Trial:
        try:
            account = pwd.getpwnam(self._user)
        except KeyError as error:
            raise TrialError(f"there is no user {self._user} on this machine") from error
        snapshot = open_gateway(self._config.gateway).snapshot()
        node, partition = _free_place(snapshot, self._config.partitions)
        gateway = _OnlyThese(self._config, node.name)
        had_lease = lease_end_s(snapshot) > snapshot.taken_s
        begun_s = self._clock()
        try:
            if self._config.gate == "licence":
                gateway.extend_lease(snapshot.taken_s + self._config.lease_s)
            for stage, code in _EXIT_CODES.items():
                job_id = gateway.submit(_member(account, partition, stage, code))
                gateway.jobs.add(job_id)
                self._say(f"submitted job {job_id} of {self._user} with --muri")
            self._check_tags(gateway)
            pilot = self._cycles(gateway, node)
            return Trial(node.name, pilot, tuple(sorted(gateway.jobs)), self._clock() - begun_s)
        finally:
            self._clean_up(gateway, had_lease=had_lease)

    def _check_tags(self, gateway: _OnlyThese) -> None:
        for job in gateway.snapshot().jobs:
            if tags.token(job.admin_comment, tags.REQUEST_PREFIX) is None:
                raise TrialError(f"job {job.job_id} has no tag: job_submit.lua does not call muri.submit")

    def _cycles(self, gateway: _OnlyThese, node: Node) -> int:
        """Run cycles until both have ended; returns the pilot."""
        pilot = 0
        deadline_s = self._clock() + DEADLINE_S
        self._know_models(gateway, node)
        with open_controller(self._config, gateway) as controller:
            while self._clock() < deadline_s:
                controller.cycle()
                jobs = [job for job in gateway.snapshot().jobs if job.job_id in gateway.jobs]
                found = self._pilot_of(jobs)
                if found and not pilot:
                    self._say(f"both are in the group of pilot job {found} on {node.name}")
                    pilot = found
                if not any(job.state.is_active for job in jobs):
                    return self._judged(jobs, pilot)
                self._clock.sleep(_EVERY_S)
        raise TrialError(f"the jobs did not end within {DEADLINE_S:g} s; they are cancelled. {self._why(gateway)}")

    @staticmethod
    def _pilot_of(jobs: list[Job]) -> int:
        states = [tags.parse_state(job.admin_comment) for job in jobs]
        pilots = {state.pilot for state in states if state is not None}
        return pilots.pop() if len(pilots) == 1 and None not in states else 0

    @staticmethod
    def _judged(jobs: list[Job], pilot: int) -> int:
        codes = sorted(job.exit_code for job in jobs)
        if not pilot:
            raise TrialError("the jobs ended, but not in a group: each ran alone")
        if codes != sorted(_EXIT_CODES.values()):
            raise TrialError(f"the members' exit codes are {codes}, not {sorted(_EXIT_CODES.values())}")
        return pilot

    def _why(self, gateway: _OnlyThese) -> str:
        shown = "; ".join(f"job {job.job_id}: {job.state} {job.reason}".strip() for job in gateway.snapshot().jobs)
        return f"Last seen: {shown or 'none of them'}. The pilot's log is /run/muri/<uid>/host-<job>.log on its node"

    def _know_models(self, gateway: _OnlyThese, node: Node) -> None:
        """Note what dry runs would find out: how long stages take."""
        make_private_directory(self._config.state_dir)
        database = self._config.state_dir / "profiles.db"
        with ProfileStore(database) as store:
            for job in map(read_job, gateway.snapshot().jobs):
                key = ProfileKey(job.request.model, 1, 1, node.gpu_type, self._user)
                load_s, preprocess_s, propagate_s, synchronize_s = (
                    SLOW_S if key.model == _model(stage) else QUICK_S for stage in STAGES
                )
                stages = (load_s, preprocess_s, propagate_s, synchronize_s)
                store.put(StageProfile(key, *stages, ITERATION_S, iterations=20))

    def _clean_up(self, gateway: _OnlyThese, *, had_lease: bool) -> None:
        """Leave no job behind, and no lease that was not there before."""
        try:
            for job in gateway.snapshot().jobs:
                if job.state.is_active:
                    gateway.cancel(job.job_id)
            if not had_lease and self._config.gate == "licence":
                gateway.end_lease()
        except MuriError as error:
            self._say(f"not everything could be cleaned up: {error}")


def _model(stage: str) -> str:
    return f"muri-trial-{stage}"


def _member(account: pwd.struct_passwd, partition: str, stage: str, code: int) -> NewJob:
    return NewJob(
        name="muri-trial",
        uid=account.pw_uid,
        gid=account.pw_gid,
        script=f"#!/bin/sh\nexec muri run -m {_TRAINING} {stage} {code}\n",
        environment={"PATH": os.environ["PATH"]},
        partition=partition,
        gpu_request="gres/gpu:1",
        time_limit_s=300,
        requeue=True,
        muri=f"model={_model(stage)},batch-size=1,duration=2s",
    )


def _free_place(snapshot: Snapshot, partitions: tuple[str, ...]) -> tuple[Node, str]:
    """Return a node with a free GPU and one of its partitions that Muri serves.

    Raises:
        TrialError: There is none now.
    """
    for node in snapshot.nodes:
        served = [name for name in node.partitions if not partitions or name in partitions]
        if node.usable and served and node.gpus_allocated < node.gpu_count:
            return node, served[0]
    raise TrialError("no usable node of a partition that Muri serves has a free GPU now; try again later")
