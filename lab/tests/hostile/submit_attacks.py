"""Runs inside a sandbox as the hostile user: submits jobs that mean harm, and writes into their comments.

Usage: submit_attacks.py SEED COUNT PARTITION. Prints the ids of the jobs that Slurm took as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from odd import Odd, written
from users import dry_run_result, pilot_report

OPTIONS: Final = (
    ("-N", "2000000000"), ("-n", "2000000000"), ("-c", "2000000000"), ("-N", "1-2000000000"), ("-t", "2000000000"),
    ("--begin=now+1000000000",), ("--array=0-9",), ("--array=0-40%1",), ("--array=0-999", "--begin=now+1day"),
    ("--exclusive",), ("--nodelist=n1",),
    ("--exclude=n1",), ("--exclude=n[1-65536]",), ("--licenses=muri_gate:1",), ("--licenses=matlab:2",),
    ("--dependency=singleton",), ("--dependency=afterok:1",), ("--nice=2000000000",), ("--hold",), ("--no-requeue",),
    ("--gres=gpu:0",), ("--gres=gpu:2000000000",), ("--gres=gpu:1K",), ("--gres=gpu:a:b:1",), ("--gpus=2000000000",),
    ("--gpus-per-task=1", "-n2"), ("--mem=1",), ("--mem-per-cpu=1",), ("--constraint=no-such",), ("--spread-job",),
    ("--signal=B:KILL@1",), ("--time-min=1",), ("--deadline=now+1hour",), ("--wckey=x",), ("--overcommit", "-n64"),
    ("--reservation=muri_gate",), ("--qos=\n",), ("--account=root",), ("--input=/etc/shadow",),
    ("--error=/etc/shadow",), ("--get-user-env=0",), ("--bbf=/etc/shadow",), ("--uid=0",), ("--prefer=x",),
)  # fmt: skip

MARKS: Final = (
    "--muri", "--muri", "--muri=model=load,batch-size=8", "--muri=model=propagate,batch-size=8,duration=1s",
    "--muri=batch-size=1000000000,accumulate=1024", "--muri=duration=3650d,checkpoint=1", "--muri=alone",
    "--muri=model=../../x", "--muri=model=a\nmuri-pilot:1:1", "--comment=muri:model=load,batch-size=8",
)  # fmt: skip

FOLDERS: Final = (
    b"plain", b"caf\xe9", b"two\nlines", b"x\n#SLURM --bbf=/etc/shadow\n#SBATCH --uid=0\ny", b"\x1b[2J\x1b]0;owned\x07",
    b"[bold red]markup", b"a b  c", b"-N 5", b"$(id)`id`", b"\xff\xfe" * 50, b"x" * 200,
)  # fmt: skip


def as_argument(text: str) -> bytes:
    """A text as a command's argument: without NUL, and of the length that Slurm takes."""
    return text.replace("\0", "").encode("utf-8", "surrogateescape" if _is_bytes(text) else "replace")[:900]


def _is_bytes(text: str) -> bool:
    return not any("\ud800" <= letter < "\udc80" or "\udcff" < letter <= "\udfff" for letter in text)


def submit(odd: Odd, partition: str) -> int | None:
    """Submit one job; None where Slurm refuses it."""
    folder = Path.home() / os.fsdecode(odd.one(FOLDERS))
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / os.fsdecode(odd.one((b"run.sh", b"caf\xe9.sh", b"two\nlines.sh")))
    body = odd.one(
        (b"exec true\n", b"exec sleep 1\n", b"muri run true\n", b"\xff\xfe\n#SLURM --bbf=/etc/shadow\nexit 3\n")
    )
    script.write_bytes(b"#!/bin/sh\n" + body)
    line = [b"sbatch", b"--parsable", b"-p", partition.encode(), b"--gres=gpu:1", b"-t", b"1", b"--requeue"]
    line += [b"--output=/home/bob/hostile-%j.out", odd.one(MARKS).encode(), b"-D", os.fsencode(folder)]
    for option in odd.random.sample(OPTIONS, odd.one((0, 0, 1, 1, 2))):
        line += [word.encode() for word in option]
    line += [b"--job-name=" + as_argument(odd.text("job")), b"--comment=" + as_argument(odd.comment())]
    line += [os.fsencode(script), as_argument(odd.text()), as_argument(odd.text("--epochs=3"))]
    environment = {**os.environb, b"ODD": as_argument(odd.text()), b"MURI_RUN_DIR": b"/home/bob"}
    done = subprocess.run(line, capture_output=True, check=False, env=environment, stdin=subprocess.DEVNULL)
    words = done.stdout.strip().split(b";")[0]
    return int(words) if done.returncode == 0 and words.isdigit() else None


def scrawl(odd: Odd, job_id: int) -> None:
    """Write a forged report into the comment of a job."""
    text = odd.one((odd.comment(written(odd.json())), dry_run_result(odd, "f00d"), pilot_report(odd, (job_id, 1))))
    line = [b"scontrol", b"update", b"JobId=%d" % job_id, b"Comment=" + as_argument(text)]
    subprocess.run(line, capture_output=True, check=False, stdin=subprocess.DEVNULL)


def own_jobs() -> list[int]:
    """Ids of the user's jobs, those that Muri runs in his name among them."""
    done = subprocess.run(["squeue", "--me", "-h", "-o", "%A"], capture_output=True, check=False, text=True)
    return sorted({int(word) for word in done.stdout.split() if word.isdigit()})


def main() -> None:
    """Submit the jobs, then write into every job's comment."""
    seed, count, partition = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    taken = [submit(Odd(f"{seed}.{number}"), partition) for number in range(count)]
    found = [job_id for job_id in taken if job_id is not None]
    for job_id in own_jobs()[:300]:
        scrawl(Odd(f"{seed}.{job_id}"), job_id)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
