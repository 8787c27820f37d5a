"""The tests of the scratch kernels, compiled and on a device."""

import pytest
import torch

from tests.scratch.kernels.test_scratch_kernels import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
