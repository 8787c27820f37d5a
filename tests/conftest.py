"""What the whole suite shares: Hypothesis profiles, and where kernels run.

The profile ``ci`` repeats exactly, ``nightly`` searches longer.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Kernels run compiled where there is a GPU, and under Triton's interpreter elsewhere. Triton reads
# the variable when it is imported, so it is set before any test module is.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("nightly", parent=settings.get_profile("ci"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def kernel_device():
    """Return the device on which Triton kernels can run here; skip where there is none."""
    torch = pytest.importorskip("torch")
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    pytest.skip("kernels need a GPU or TRITON_INTERPRET=1")
