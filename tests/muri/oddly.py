"""Becomes a program that inherits nothing as usual: `python oddly.py UMASK PROGRAM ARGUMENT…`."""

import ctypes
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

EXTRA = 9
CAPBSET_DROP, DAC_OVERRIDE, DAC_READ_SEARCH = 24, 1, 2


def main(umask: str, *program: str) -> None:
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):  # with which root would not notice its umask
        ctypes.CDLL(None).prctl(CAPBSET_DROP, capability, 0, 0, 0)
    for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.chdir(folder := tempfile.mkdtemp())
    Path(folder).rmdir()
    for name, soft in (("NOFILE", 64), ("CORE", 0), ("FSIZE", 2000)):
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))
    os.umask(int(umask, 8))
    os.dup2(os.open(os.devnull, os.O_RDWR), EXTRA, inheritable=True)
    os.closerange(0, 3)
    os.execv(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
