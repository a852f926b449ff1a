"""GPU telemetry against a stand-in for NVML: no GPU is needed, and none is proven here."""

import pytest
from fake_nvml import MIB, Device, FakeNvml

from muri.profiler import gpu_usage as nvml
from muri.profiler.gpu_usage import GpuReader, GpuUnreadableError, check
from muri.profiler.records import OneGpu


@pytest.fixture
def gpus():
    return (
        Device("GPU-aaaa1111", utilization=20, used_mib=1024, processes={10: 512 * MIB, 99: 256 * MIB}),
        Device("GPU-aaaa2222", utilization=80, used_mib=3072, processes={11: 1024 * MIB}),
        Device("GPU-bbbb3333", utilization=50),
    )


def reader(gpus, visible=None, **options):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return GpuReader(environment, FakeNvml(*gpus, **options))


def test_reads_all_gpus_and_only_the_jobs_memory(gpus):
    assert reader(gpus).read(frozenset({10, 11})) == pytest.approx((0.5, 1.5))


@pytest.mark.parametrize(
    ("visible", "utilization"),
    [
        ("1", 0.8),
        ("2,0", 0.35),
        ("GPU-bbbb", 0.5),
        ("GPU-aaaa2222,GPU-bbbb3333", 0.65),
        ("0,7,1", 0.2),  # CUDA stops at the first name that means nothing
        ("0,GPU-aaaa,1", 0.2),  # ambiguous
    ],
)
def test_only_visible_gpus_count(gpus, visible, utilization):
    assert reader(gpus, visible).read(frozenset())[0] == pytest.approx(utilization)


@pytest.mark.parametrize("visible", ["", "-1", "9", "NoDevFiles", "MIG-unknown"])
def test_no_visible_gpu_is_said(gpus, visible):
    with pytest.raises(GpuUnreadableError, match="shows none of the 3 GPUs"):
        reader(gpus, visible)


def test_a_mig_instance_says_what_it_does_not_support():
    refused = dict.fromkeys(("utilization",), FakeNvml.NVML_ERROR_NOT_SUPPORTED)
    instance = Device("MIG-5", used_mib=2048, processes={10: 1024 * MIB}, refuses=refused)
    found = reader([Device("GPU-a")], "MIG-5", mig={"MIG-5": instance})
    assert found.read(frozenset({10})) == (None, 1.0)
    assert found.each_gpu() == {0: OneGpu(None, 2.0)}
    assert any("GPU utilization cannot be read: not supported" in note for note in found.notes)


def test_what_is_refused_for_good_is_not_asked_again(gpus):
    gpus[0].refuses["utilization"] = FakeNvml.NVML_ERROR_NO_PERMISSION
    found = reader(gpus)
    assert found.read(frozenset())[0] is None
    gpus[0].refuses.clear()
    assert found.read(frozenset())[0] is None
    assert [note for note in found.notes if "no permission" in note]


def test_memory_that_the_driver_does_not_tell_apart_is_unknown_and_no_zero(gpus, monkeypatch):
    monkeypatch.setattr(nvml, "_pid_namespace", lambda: "pid:[4026532999]")
    found = reader(gpus)
    assert found.read(frozenset({5}))[1] is None
    assert any("container" in note for note in found.notes)
    monkeypatch.setattr(nvml, "_pid_namespace", lambda: nvml.FIRST_PID_NAMESPACE)
    assert reader(gpus).read(frozenset({5}))[1] == 0
    gpus[0].processes[10] = None
    assert reader(gpus).read(frozenset({10}))[1] is None


def test_check_is_silent_when_gpus_can_be_read_and_lets_nvml_go(gpus):
    library = FakeNvml(*gpus)
    assert check({}, library) is None
    assert library.open == 0
    assert "finds no GPU" in check({}, FakeNvml())
    assert library.open == 0


def test_the_stand_in_has_the_names_and_values_of_the_real_bindings():
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed (extra torch)")
    names = [name for name in vars(FakeNvml) if name.startswith(("NVML", "nvml"))]
    assert len(names) > 15
    for name in names:
        real = getattr(pynvml, name)
        assert callable(real) or real == getattr(FakeNvml, name), name
