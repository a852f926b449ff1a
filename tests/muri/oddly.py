"""Becomes a program that inherits nothing as usual: `python oddly.py UMASK PROGRAM ARGUMENT…`."""

import ctypes
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

CAPBSET_DROP, DAC_OVERRIDE, DAC_READ_SEARCH = 24, 1, 2

if __name__ == "__main__":
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):  # with which root would not notice its umask
        ctypes.CDLL(None).prctl(CAPBSET_DROP, capability, 0, 0, 0)
    for ignored in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.chdir(folder := tempfile.mkdtemp())
    Path(folder).rmdir()
    for limit, soft in ((resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 2000)):
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    os.umask(int(sys.argv[1], 8))
    os.dup2(os.open(os.devnull, os.O_RDWR), 9, inheritable=True)
    os.closerange(0, 3)
    os.execv(sys.argv[2], sys.argv[2:])
