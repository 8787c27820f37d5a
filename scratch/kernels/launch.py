"""The Triton kernels and their launchers: with ``alloc.kernels.jit`` all that imports triton here.

All three are bound by memory, so they are built for wide accesses: a program moves whole rows or a
run of a page, shapes that a model never changes are compile-time constants, and numbers that
change with every batch are not specialised. Conversions are done on the bits: they round as torch
does, on a device and under the interpreter alike (but for which NaN a NaN becomes).

``scratch.kernels`` documents the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from alloc.kernels.jit import kernel

_BLOCK = 1024
"""Words or slots of a program."""

_PACK_BLOCK = 512
"""Words of a pack program: many small programs keep more reads in flight than few large ones. On an
H200 that is 4% faster than 1,024 words."""

_TILE = 4096
"""Elements of a store program's widest part."""


# Translate


@kernel("num_slots", "num_pages")
def _translate_kernel(
    rows: tl.tensor,
    loc: tl.tensor,
    page_pos: tl.tensor,
    num_slots: tl.tensor,
    num_pages: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < num_slots
    slot = tl.load(loc + index, mask=live, other=0).to(tl.int64)
    page = slot // PAGE_SIZE
    page = tl.where((slot >= 0) & (page < num_pages), page, 0)
    place = tl.load(page_pos + page, mask=live, other=0).to(tl.int64)
    tl.store(rows + index, place * PAGE_SIZE + slot % PAGE_SIZE, mask=live)


def translate_locs(loc: torch.Tensor, page_pos: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return scratch rows of slots."""
    flat = loc.reshape(-1)
    rows = torch.empty(loc.shape, dtype=torch.int64, device=loc.device)
    if len(flat):
        grid = (triton.cdiv(len(flat), _BLOCK),)
        _translate_kernel[grid](rows, flat, page_pos, len(flat), len(page_pos), page_size, _BLOCK)
    return rows


# Pack


@kernel()
def _copy_page_run(
    out: tl.tensor,
    part: tl.tensor,
    page: tl.tensor,
    run: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMN: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy a run of a page's words of one part; ``out`` is where the page's first row goes."""
    word = run * BLOCK + tl.arange(0, BLOCK)
    live = word < PAGE_SIZE * WIDTH
    values = tl.load(part + page * (PAGE_SIZE * WIDTH) + word, mask=live)
    if WIDTH == OUT_WIDTH:
        tl.store(out + word, values, mask=live)
    else:
        at = (word // WIDTH) * OUT_WIDTH + COLUMN + word % WIDTH
        tl.store(out + at, values, mask=live)


@kernel()
def _pack_kernel(
    out: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    send_pages: tl.tensor,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1)
    page = tl.load(send_pages + place)
    width: tl.constexpr = FIRST_WIDTH + SECOND_WIDTH
    first_runs: tl.constexpr = (PAGE_SIZE * FIRST_WIDTH + BLOCK - 1) // BLOCK
    block = out + place * (PAGE_SIZE * width)
    if run < first_runs:
        _copy_page_run(block, first, page, run, FIRST_WIDTH, 0, width, PAGE_SIZE, BLOCK)
    elif SECOND_WIDTH > 0:
        run -= first_runs
        _copy_page_run(block, second, page, run, SECOND_WIDTH, FIRST_WIDTH, width, PAGE_SIZE, BLOCK)


def pack_pages(
    out: torch.Tensor, parts: Sequence[torch.Tensor], send_pages: torch.Tensor, page_size: int
) -> None:
    """Copy whole pages of a pool into a block of rows."""
    if not len(send_pages):
        return
    word = _widest_word([out, *parts])
    out, *parts = (tensor.view(word) for tensor in (out, *parts))
    widths = [part.shape[1] for part in parts] + [0]
    runs = sum(triton.cdiv(page_size * width, _PACK_BLOCK) for width in widths)
    _pack_kernel[len(send_pages), runs](
        out, parts[0], parts[-1], send_pages, widths[0], widths[1], page_size, _PACK_BLOCK
    )


def _widest_word(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the widest integer dtype as which all rows can be moved."""
    sizes = [tensor.shape[1] * tensor.element_size() for tensor in tensors]
    starts = [tensor.data_ptr() for tensor in tensors]
    common = gcd(*sizes, *starts, 8)
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[common]


# Store


class _Rounding(NamedTuple):
    """How a float32's bits are rounded to a smaller float; a kernel gets it as a plain tuple.

    Attributes:
        mantissa: bits of the mantissa; 23 leaves a float32 as it is.
        bias: of the exponent.
        limit: bits of the first float32 that is ``overflow`` whatever its rounding.
        overflow: what lies there, infinities included.
        nan: what NaN becomes.
        sign: place of the sign bit.
    """

    mantissa: int
    bias: int
    limit: int
    overflow: int
    nan: int
    sign: int


_E4M3_OVERFLOW = int(torch.tensor(1e9).to(torch.float8_e4m3fn).view(torch.uint8))
"""NaN or the largest number, as this torch has it: the format has no infinity."""

_ABOVE_464 = 0x43E80001
"""Bits of the first float32 that rounds beyond 448, the largest number of e4m3."""

_ROUNDINGS = {
    torch.float32: _Rounding(23, 127, 255 << 23, 0, 0, 31),
    torch.bfloat16: _Rounding(7, 127, 255 << 23, 0x7F80, 0x7FC0, 15),
    torch.float16: _Rounding(10, 15, 143 << 23, 0x7C00, 0x7E00, 15),
    torch.float8_e5m2: _Rounding(2, 15, 143 << 23, 0x7C, 0x7F, 7),
    torch.float8_e4m3fn: _Rounding(3, 7, _ABOVE_464, _E4M3_OVERFLOW, 0x7F, 7),
}
"""Pool dtypes that a kernel converts to."""

_AS_IS, _FLOAT, _BFLOAT16_BITS = 0, 1, 2


@kernel()
def _rounded_bits(
    bits: tl.tensor,
    ROUNDING: tl.constexpr,
) -> tl.tensor:
    """Return the bits of float32 bits rounded to nearest, ties to even: int32."""
    MANTISSA: tl.constexpr = ROUNDING[0]
    BIAS: tl.constexpr = ROUNDING[1]
    size = bits & 0x7FFFFFFF
    shift: tl.constexpr = 23 - MANTISSA
    half: tl.constexpr = (1 << (shift - 1)) - 1
    rebias: tl.constexpr = (127 - BIAS) << MANTISSA
    rounded = ((size + half + ((size >> shift) & 1)) >> shift) - rebias
    if BIAS != 127:
        # Below the smallest normal number, adding a power of two lets the adder round.
        power: tl.constexpr = (127 - BIAS + shift + 1) << 23
        smallest: tl.constexpr = (128 - BIAS) << 23
        small = tl.where(size < smallest, size, 0).to(tl.float32, bitcast=True)
        adder = tl.full(size.shape, power, tl.int32).to(tl.float32, bitcast=True)
        tiny = (small + adder).to(tl.int32, bitcast=True) - power
        rounded = tl.where(size < smallest, tiny, rounded)
    rounded = tl.where(size >= ROUNDING[2], ROUNDING[3], rounded)
    rounded = tl.where(size > 0x7F800000, ROUNDING[4], rounded)
    return rounded | (((bits >> 31) & 1) << ROUNDING[5])


@kernel()
def _store_part(
    values: tl.tensor,
    target: tl.tensor,
    scratch: tl.tensor,
    token: tl.tensor,
    live: tl.tensor,
    pool_row: tl.tensor,
    scratch_row: tl.tensor,
    values_stride: tl.tensor,
    target_stride: tl.tensor,
    scratch_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGED: tl.constexpr,
    SOURCE: tl.constexpr,
    ROUNDING: tl.constexpr,
) -> None:
    """Read rows of one part once; write each where it belongs."""
    owned = live & (pool_row >= 0)
    for start in tl.static_range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < WIDTH)[None, :]
        read = live if STAGED else owned
        at = values + token[:, None] * values_stride + column[None, :]
        bits = tl.load(at, mask=read[:, None] & inside)
        if SOURCE != 0:
            if SOURCE == 1:
                bits = bits.to(tl.float32).to(tl.int32, bitcast=True)
            else:
                bits = bits.to(tl.int32) << 16
            if ROUNDING[0] < 23:
                bits = _rounded_bits(bits, ROUNDING)
            bits = bits.to(target.dtype.element_ty)
        if STAGED:
            at = scratch + scratch_row[:, None] * scratch_stride + column[None, :]
            tl.store(at, bits, mask=live[:, None] & inside)
        at = target + pool_row[:, None] * target_stride + column[None, :]
        tl.store(at, bits, mask=owned[:, None] & inside)


@kernel("num_tokens")
def _store_kernel(
    first: tl.tensor,
    second: tl.tensor,
    first_target: tl.tensor,
    second_target: tl.tensor,
    scratch: tl.tensor,
    pool_rows: tl.tensor,
    scratch_rows: tl.tensor,
    num_tokens: tl.tensor,
    first_stride: tl.tensor,
    second_stride: tl.tensor,
    first_target_stride: tl.tensor,
    second_target_stride: tl.tensor,
    scratch_stride: tl.tensor,
    FIRST_WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGED: tl.constexpr,
    SOURCE: tl.constexpr,
    ROUNDING: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    pool_row = tl.load(pool_rows + token, mask=live, other=-1)
    scratch_row = pool_row
    if STAGED:
        scratch_row = tl.load(scratch_rows + token, mask=live, other=0)
    _store_part(
        first,
        first_target,
        scratch,
        token,
        live,
        pool_row,
        scratch_row,
        first_stride,
        first_target_stride,
        scratch_stride,
        FIRST_WIDTH,
        FIRST_BLOCK,
        STAGED,
        SOURCE,
        ROUNDING,
    )
    if SECOND_WIDTH > 0:
        _store_part(
            second,
            second_target,
            scratch + FIRST_WIDTH,
            token,
            live,
            pool_row,
            scratch_row,
            second_stride,
            second_target_stride,
            scratch_stride,
            SECOND_WIDTH,
            SECOND_BLOCK,
            STAGED,
            SOURCE,
            ROUNDING,
        )


def store_rows(
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    targets: Sequence[torch.Tensor],
    pool_rows: torch.Tensor,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
) -> None:
    """Convert a chunk's rows, persist the owned ones, and stage all of them in a scratch."""
    if not len(pool_rows):
        return
    staged = scratch is not None and scratch_rows is not None
    values, source = _kernel_values(values, dtype, targets[0].dtype)
    widths = [value.shape[1] for value in values] + [0]
    blocks = [min(_BLOCK, triton.next_power_of_2(width)) for width in widths]
    tokens = max(1, min(16, _TILE // max(blocks)))
    rounding = _ROUNDINGS.get(dtype, _ROUNDINGS[torch.float32])
    into = scratch if scratch is not None else targets[0]
    _store_kernel[(triton.cdiv(len(pool_rows), tokens),)](
        values[0],
        values[-1],
        targets[0],
        targets[-1],
        into,
        pool_rows,
        scratch_rows if scratch_rows is not None else pool_rows,
        len(pool_rows),
        values[0].stride(0),
        values[-1].stride(0),
        targets[0].stride(0),
        targets[-1].stride(0),
        into.stride(0),
        widths[0],
        widths[1],
        blocks[0],
        max(1, blocks[1]),
        tokens,
        staged,
        source,
        tuple(rounding),
    )


def _kernel_values(
    values: Sequence[torch.Tensor], dtype: torch.dtype, bits: torch.dtype
) -> tuple[list[torch.Tensor], int]:
    """Return values as a kernel reads them, and how; what it can't convert torch converts."""
    given = {value.dtype for value in values}
    (only,) = given if len(given) == 1 else (None,)
    kept = [value if value.stride(1) == 1 else value.contiguous() for value in values]
    if only in (torch.float32, torch.float16) and only != dtype and dtype in _ROUNDINGS:
        return kept, _FLOAT
    if only == torch.bfloat16 and only != dtype and dtype in _ROUNDINGS:
        return [value.view(torch.int16) for value in kept], _BFLOAT16_BITS
    return [value.to(dtype).view(bits) for value in kept], _AS_IS
