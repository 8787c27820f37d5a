"""How ranks come to the same decision about what only each of them can see.

Bookkeeping is the same on every rank because it depends on calls alone. Two facts are local: which
copies have finished, and which files a rank finds intact. Each goes through an agreement, an
element-wise minimum over the ranks, before anything depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from alloc import IntArray

Agreement: TypeAlias = Callable[[IntArray], IntArray]
"""int64[n] -> int64[n], the element-wise minimum over all ranks. Every rank calls it in step."""


def alone(values: IntArray) -> IntArray:
    """Agree with nobody: the agreement of one process."""
    return values


def agreement_over(process_group: Any = None, *, device: Any = "cpu") -> Agreement:
    """Return the agreement of the ranks of a ``torch.distributed`` process group.

    Args:
        process_group: the ranks; None for the default group. Give it a communicator of its own.
        device: where the group's backend takes tensors: "cpu" for Gloo, a CUDA device for NCCL.

    Returns:
        A collective: every rank calls it in the same order with as many values.
    """
    import torch
    import torch.distributed as dist

    def agree(values: IntArray) -> IntArray:
        tensor = torch.from_numpy(np.array(values, dtype=np.int64)).to(device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=process_group)
        agreed: IntArray = tensor.cpu().numpy()
        return agreed

    return agree
