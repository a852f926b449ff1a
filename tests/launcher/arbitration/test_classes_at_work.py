"""How fast members are beside each other: four with different bottlenecks, and the two classes of AntMan."""

import pytest
from test_promises import GPU, PREPROCESS, Script, speeds


def on_gpu(min_speed: float, piece_s: float = 1e9) -> Script:
    """Iterations of 100 ms, 70 of them on the GPU, handed over every `piece_s` at most."""
    return Script(((0, 0.01), (PREPROCESS, 0.01), (GPU, 0.07), (3, 0.01)), piece_s=piece_s, min_speed=min_speed)


@pytest.mark.parametrize(
    ("promise", "piece_s", "guaranteed", "opportunistic"),
    [(0.95, 0.02, 0.95, 0.48), (0.95, 1e9, 0.95, 0.13), (0.999, 1e9, 1.0, 0.0), (0.0, 0.02, 0.72, 0.71)],
)
def test_a_guaranteed_job_goes_first(promise: float, piece_s: float, guaranteed: float, opportunistic: float) -> None:
    found = speeds([on_gpu(promise), on_gpu(0.0, piece_s)])
    assert found == pytest.approx((guaranteed, opportunistic), abs=0.02)


@pytest.mark.parametrize("slow_factor", [1, 10])
def test_four_bottlenecks_share_four_resources_well(slow_factor: int) -> None:
    """Pieces of 10 ms: far more total progress than one after the other."""
    seconds = [[0.07 if stage == member else 0.01 for stage in range(4)] for member in range(4)]
    seconds[3] = [each * slow_factor for each in seconds[3]]
    found = speeds([Script(tuple(enumerate(each)), piece_s=0.01) for each in seconds], window_s=20.0, warmup_s=2.0)
    assert sum(found) > 2.4
    assert min(found) > 0.3
