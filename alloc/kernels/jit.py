"""How kernels of this project are compiled. Imports triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import triton

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def kernel(*numbers: str) -> Callable[[Kernel], Any]:
    """Compile a function whose arguments ``numbers`` differ from batch to batch.

    They are not specialised, neither on 1 nor on their alignment, so that one compilation serves
    every batch.
    """
    decorate: Callable[[Kernel], Any] = triton.jit(
        do_not_specialize=list(numbers), do_not_specialize_on_alignment=list(numbers)
    )
    return decorate
