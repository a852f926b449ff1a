"""`muri run` of a member with a scheduler that notes its calls."""

import sys

from launcher_harness import Launcher, Process

MEMBER = {"MURI_JOB": "on", "MURI_REQUEUE_WAIT_S": "0.1", "MURI_ATTACH_TIMEOUT_S": "0.5"}


SLEEPER = "print('started', flush=True)\nimport time\ntime.sleep(600)\n"


CLIENT = """
    import json, os, sys
    from muri.commands import run_command
    from dataclasses import replace
    from muri.group_spec import MemberSpec, Place
    from muri.launcher.run import command
    from muri.pythons import own_python

    class Recorder:
        expected = {expected!r}

        def await_place(self, job_id):
            return Place("", MemberSpec(job_id)) if self.expected else None

        def requeue(self, job_id, reason):
            with open("requeued.jsonl", "a") as file:
                file.write(json.dumps([job_id, reason]) + "\\n")

    command.script_python = lambda environment: replace(own_python(), prefix={prefix!r})
    command.load_membership = Recorder
    sys.exit(run_command(command.run))
"""


def member(
    launcher: Launcher,
    job_id: str,
    *arguments: object,
    expected: bool = True,
    prefix: str = sys.prefix,
    code: str = CLIENT,
    before: tuple[str, ...] = (),
    **variables: str,
) -> Process:
    """`muri run` with a scheduler that notes its calls."""
    client = launcher.script(code.format(expected=expected, prefix=prefix), f"client-{job_id}.py")
    launcher.warm = launcher.warm and not before
    command = (*before, sys.executable, str(client))
    return launcher.member(job_id, *arguments, command=command, **(MEMBER | variables))
