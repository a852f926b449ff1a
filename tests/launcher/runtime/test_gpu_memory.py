"""The GPU's memory, asked of a driver that a compiler makes for the test."""

import subprocess
from pathlib import Path

import pytest

from muri.launcher.runtime.admission import total_gib

DRIVER = """
#include <stddef.h>
int cuInit(unsigned flags) { return INIT; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return ordinal; }
int cuDeviceTotalMem_v2(size_t *total, int device) { *total = (size_t)80 << 30; return device == 7 ? 0 : 101; }
"""


@pytest.mark.parametrize(("error", "found_gib"), [(0, 80.0), (100, None)])
def test_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, found_gib: float | None
) -> None:
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", f"-DINIT={error}", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert total_gib() == found_gib
