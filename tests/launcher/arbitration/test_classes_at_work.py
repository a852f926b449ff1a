"""AntMan's classes at work: the promise to a guaranteed job, and what is left over for an opportunistic one."""

import pytest
from test_promises import CPU, GPU, Script, speeds


def on_gpu(min_speed: float, piece_s: float = 1e9) -> Script:
    """Iterations of 100 ms, 70 of them on the GPU, handed over every `piece_s` at most."""
    return Script(((0, 0.01), (CPU, 0.01), (GPU, 0.07), (3, 0.01)), piece_s=piece_s, min_speed=min_speed)


@pytest.mark.parametrize(
    ("promise", "piece_s", "guaranteed", "opportunistic"),
    [(0.95, 0.02, 0.95, 0.48), (0.95, 1e9, 0.95, 0.13), (0.999, 1e9, 1.0, 0.0), (0.0, 0.02, 0.72, 0.71)],
)
def test_a_guaranteed_job_goes_first(promise: float, piece_s: float, guaranteed: float, opportunistic: float) -> None:
    found = speeds([on_gpu(promise), on_gpu(0.0, piece_s)])
    assert found == pytest.approx((guaranteed, opportunistic), abs=0.02)
