"""The kernel for scattered pages copies what plain indexing copies."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize(("page_size", "width"), [(1, 3), (2, 7), (16, 24), (64, 576)])
def test_it_equals_indexing(kernel_device, dtype, page_size, width):
    from tiers.page_kernel import copy_pages

    rng = np.random.default_rng(page_size * width)
    source, target = (
        torch.from_numpy(rng.integers(0, 127, (9 * page_size, width))).to(dtype) for _ in range(2)
    )
    sources, targets = rng.permutation(9)[:5], rng.permutation(9)[:5]
    want = target.clone()
    want.view(9, -1)[targets] = source.view(9, -1)[sources]
    places = torch.from_numpy(np.stack([sources, targets])).to(kernel_device)
    source, target = source.to(kernel_device), target.to(kernel_device)
    copy_pages(source, target, places, page_size)
    assert torch.equal(target.cpu(), want)
    copy_pages(source, target, places[:, :0], page_size)
    assert torch.equal(target.cpu(), want)
