"""Operations that move elements."""

from __future__ import annotations

from mindspore import Tensor, mint, ops
from mindspore.ops.auto_generate import Chunk, Narrow, SliceExt, SplitTensor, SplitWithSize

from tests.derivative_cases.shapes import Case, one, two


def reshape(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def transpose(x: Tensor) -> Tensor:
    return x.transpose(0, 2, 1)


def permute(x: Tensor) -> Tensor:
    return mint.permute(x, (0, 2, 1))


def swap(x: Tensor) -> Tensor:
    return mint.transpose(x, 1, 2)


def expand(x: Tensor) -> Tensor:
    return ops.expand_dims(x, 1)


def expand_view(x: Tensor) -> Tensor:
    return mint.unsqueeze(x, 1)


def squeeze(x: Tensor) -> Tensor:
    return ops.squeeze(ops.ReduceSum(keep_dims=True)(x, 1), 1)


def flatten(x: Tensor) -> Tensor:
    return ops.flatten(x)


def broadcast(x: Tensor) -> Tensor:
    return ops.broadcast_to(x, (4, *x.shape))


def broadcast_view(x: Tensor) -> Tensor:
    return mint.broadcast_to(x, (4, *x.shape))


def tile(x: Tensor) -> Tensor:
    return ops.tile(x, (1, 2, 3))


def repeat(x: Tensor) -> Tensor:
    return ops.repeat_interleave(x, 2, 1)


def repeat_extended(x: Tensor) -> Tensor:
    return mint.repeat_interleave(x, 2, 1)


def concatenate(x: Tensor, y: Tensor) -> Tensor:
    return ops.cat((x, y, x), -1)


def stack(x: Tensor, y: Tensor) -> Tensor:
    return ops.stack((x, y), 1)


def stack_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.stack((x, y), 1)


def split_one(x: Tensor) -> Tensor:
    return ops.split(x, x.shape[1] // 2, 1)[0]


def split_all(x: Tensor) -> Tensor:
    first, second = ops.split(x, x.shape[-1] // 2, -1)
    return first * second


def chunk(x: Tensor) -> Tensor:
    first, second = mint.chunk(x, 2, -1)
    return first * second


def split_view(x: Tensor) -> Tensor:
    first, second = mint.split(x, x.shape[-1] // 2, -1)
    return first * second


def split_sizes(x: Tensor) -> Tensor:
    first, second = ops.split(x, (1, x.shape[1] - 1), 1)
    return first * second


def split_sizes_view(x: Tensor) -> Tensor:
    first, second = mint.split(x, (1, x.shape[1] - 1), 1)
    return first * second


def chunk_primitive(x: Tensor) -> Tensor:
    first, second = Chunk()(x, 2, -1)
    return first * second


def split_primitive(x: Tensor) -> Tensor:
    first, second = SplitTensor()(x, x.shape[-1] // 2, -1)
    return first * second


def split_sizes_primitive(x: Tensor) -> Tensor:
    first, second = SplitWithSize()(x, (x.shape[-1] // 2, x.shape[-1] // 2), -1)
    return first * second


def flatten_extended(x: Tensor) -> Tensor:
    return mint.flatten(x, 1)


def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def unstack(x: Tensor) -> Tensor:
    return ops.unstack(x, 0)[0]


def part(x: Tensor) -> Tensor:
    return x[:, 1:3]


def row(x: Tensor) -> Tensor:
    return x[:, 0]


def every_second(x: Tensor) -> Tensor:
    return x[..., ::2]


def plain_slice(x: Tensor) -> Tensor:
    return ops.slice(x, (0, 1, 0), (1, 2, 2))


def narrow(x: Tensor) -> Tensor:
    return mint.narrow(x, 1, 0, 2)


def pad(x: Tensor) -> Tensor:
    return ops.Pad(((0, 0), (1, 1), (0, 0)))(x)


def pad_last(x: Tensor) -> Tensor:
    return ops.pad(x, (1, 1))


def roll(x: Tensor) -> Tensor:
    return ops.roll(x, 1, 1)


def flip(x: Tensor) -> Tensor:
    return ops.flip(x, (1,))


def tril(x: Tensor) -> Tensor:
    return ops.tril(x)


def triu(x: Tensor) -> Tensor:
    return ops.triu(x)


def ones_and_zeros(x: Tensor) -> Tensor:
    return ops.ones_like(x) + ops.zeros_like(x) + x


def repeat_copies(x: Tensor) -> Tensor:
    return x.repeat((2, 1, 3))


def repeat_on_more_axes(x: Tensor) -> Tensor:
    return x.repeat((4, 1, 2, 1))


def repeat_in_front(x: Tensor) -> Tensor:
    return x.repeat((2, 3, 1, 1, 2))


def slice_view(x: Tensor) -> Tensor:
    return SliceExt()(x, 1, 1, 3, 1)


def narrow_primitive(x: Tensor) -> Tensor:
    return Narrow()(x, 1, 1, 2)


CASES: list[Case] = [
    (reshape, one), (transpose, one), (permute, one), (swap, one), (expand, one), (expand_view, one),
    (squeeze, one), (flatten, one), (broadcast, one), (broadcast_view, one), (tile, one), (repeat, one),
    (repeat_extended, one), (concatenate, two), (stack, two), (stack_extended, two), (split_one, one),
    (split_sizes, one), (split_sizes_view, one), (flatten_extended, one), (contiguous, one),
    (split_all, one), (chunk, one), (split_view, one), (unstack, one), (part, one), (row, one), (every_second, one),
    (plain_slice, one), (narrow, one), (pad, one), (pad_last, one), (roll, one), (flip, one), (tril, one),
    (triu, one), (ones_and_zeros, one), (chunk_primitive, one), (split_primitive, one),
    (split_sizes_primitive, one),
    (repeat_copies, one), (repeat_on_more_axes, one), (repeat_in_front, one), (slice_view, one),
    (narrow_primitive, one),
]  # fmt: skip
