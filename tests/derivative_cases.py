"""One function per way to use a primitive; MindSpore parses each from its source, so none can be a lambda.

Shapes are functions of a batch, a length and a width, so that every case runs at several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.ops.auto_generate import (
    AddScalar,
    Chunk,
    GroupedMatmul,
    GroupedMatmulV4,
    MoeTokenPermute,
    MoeTokenUnpermute,
    SplitTensor,
    SplitWithSize,
    SubScalar,
)
from mindspore.ops.operations import nn_ops

Shapes = Callable[[int, int, int], list[tuple[int, ...]]]

PLACES = Tensor(np.array([1, 2, 0]), ms.int32)
POINTS = Tensor(np.array([[0, 1], [1, 2]]), ms.int32)
ROWS = Tensor(np.array([[0], [1]]), ms.int32)
ENDS = Tensor(np.array([2, 2, 4]), ms.int64)
CAUSAL = Tensor(np.triu(np.ones((2048, 2048)), 1), ms.uint8)


def one(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h)]


def two(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (b, s, h)]


def with_vector(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (h,)]


def with_column(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (s, 1)]


def with_gain_and_shift(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, s, h), (h,), (h,)]


def image(b: int, s: int, h: int) -> list[tuple[int, ...]]:
    return [(b, h, s, s)]


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def add_number(x: Tensor) -> Tensor:
    return x + 1.0


def add_scaled(x: Tensor, y: Tensor) -> Tensor:
    return mint.add(x, y, alpha=2)


def subtract(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def subtract_from_number(x: Tensor) -> Tensor:
    return 1.0 - x


def subtract_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.sub(x, y)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def multiply_number(x: Tensor) -> Tensor:
    return x * 2.5


def divide(x: Tensor, y: Tensor) -> Tensor:
    return x / y


def divide_number(x: Tensor) -> Tensor:
    return x / 2.5


def divide_old(x: Tensor, y: Tensor) -> Tensor:
    return ops.RealDiv()(x, y)


def power(x: Tensor, y: Tensor) -> Tensor:
    return ops.pow(x, y)


def power_constant(x: Tensor) -> Tensor:
    return x**2


def power_number(x: Tensor) -> Tensor:
    return mint.pow(x, 2)


def power_of_number(x: Tensor) -> Tensor:
    return mint.pow(2.0, x)


def maximum(x: Tensor, y: Tensor) -> Tensor:
    return ops.maximum(x, y)


def minimum(x: Tensor, y: Tensor) -> Tensor:
    return ops.minimum(x, y)


def where(x: Tensor, y: Tensor) -> Tensor:
    return ops.where(x > 0, x, y)


def select(x: Tensor, y: Tensor) -> Tensor:
    return ops.select(x > 0, x, y)


def masked_fill(x: Tensor) -> Tensor:
    return ops.masked_fill(x, x > 0, -1e4)


def add_many(x: Tensor, y: Tensor) -> Tensor:
    return ops.addn((x, y, x))


def bias_add(x: Tensor, y: Tensor) -> Tensor:
    return ops.BiasAdd()(x.reshape(-1, x.shape[-1]), y)


def lerp(x: Tensor, y: Tensor) -> Tensor:
    return ops.lerp(x, y, 0.25)


def xdivy(x: Tensor, y: Tensor) -> Tensor:
    return ops.xdivy(x, y)


def floor(x: Tensor) -> Tensor:
    return ops.floor(x) + x


def ceil(x: Tensor) -> Tensor:
    return ops.ceil(x) + x


def sign(x: Tensor) -> Tensor:
    return ops.sign(x) + x


def round_(x: Tensor) -> Tensor:
    return ops.round(x) + x


def trunc(x: Tensor) -> Tensor:
    return ops.trunc(x) + x


def add_scalar_primitive(x: Tensor) -> Tensor:
    return AddScalar()(x, 2.0, 3)


def subtract_scalar_primitive(x: Tensor) -> Tensor:
    return SubScalar()(x, 2.0, 3)


def floor_divide(x: Tensor, y: Tensor) -> Tensor:
    return ops.floor_divide(x, y) * x


def absolute(x: Tensor) -> Tensor:
    return ops.abs(x)


def atan(x: Tensor) -> Tensor:
    return ops.atan(x)


def cast(x: Tensor) -> Tensor:
    return ops.exp(x.astype(ms.float16)).astype(ms.float32)


def clamp(x: Tensor) -> Tensor:
    return ops.clamp(x, 0.1, 0.9)


def cosine(x: Tensor) -> Tensor:
    return ops.cos(x)


def sine(x: Tensor) -> Tensor:
    return ops.sin(x)


def dropout(x: Tensor) -> Tensor:
    return ops.dropout(x, 0.5)


def dropout_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.dropout(x, 0.5, True)


def elu(x: Tensor) -> Tensor:
    return ops.elu(x)


def erf(x: Tensor) -> Tensor:
    return ops.erf(x)


def exp(x: Tensor) -> Tensor:
    return ops.exp(x)


def expm1(x: Tensor) -> Tensor:
    return ops.expm1(x)


def gelu(x: Tensor) -> Tensor:
    return ops.gelu(x, approximate="tanh")


def gelu_exact(x: Tensor) -> Tensor:
    return ops.gelu(x)


def gelu_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.gelu(x)


def hard_swish(x: Tensor) -> Tensor:
    return ops.hardswish(x)


def leaky_relu(x: Tensor) -> Tensor:
    return ops.leaky_relu(x)


def log(x: Tensor) -> Tensor:
    return ops.log(x)


def log1p(x: Tensor) -> Tensor:
    return ops.log1p(x)


def log_sigmoid(x: Tensor) -> Tensor:
    return mint.nn.functional.logsigmoid(x)


def mish(x: Tensor) -> Tensor:
    return ops.mish(x)


def negative(x: Tensor) -> Tensor:
    return -x


def normalise_l2(x: Tensor) -> Tensor:
    return ops.L2Normalize(-1)(x)


def reciprocal(x: Tensor) -> Tensor:
    return ops.reciprocal(x)


def relu(x: Tensor) -> Tensor:
    return ops.relu(x)


def relu6(x: Tensor) -> Tensor:
    return ops.relu6(x)


def rsqrt(x: Tensor) -> Tensor:
    return ops.rsqrt(x)


def sigmoid(x: Tensor) -> Tensor:
    return ops.sigmoid(x)


def silu(x: Tensor) -> Tensor:
    return ops.silu(x)


def softplus(x: Tensor) -> Tensor:
    return ops.softplus(x)


def softplus_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.softplus(x)


def sqrt(x: Tensor) -> Tensor:
    return ops.sqrt(x)


def square(x: Tensor) -> Tensor:
    return ops.square(x)


def swiglu(x: Tensor) -> Tensor:
    return ops.swiglu(x)


def tanh(x: Tensor) -> Tensor:
    return ops.tanh(x)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    return ops.matmul(x, y)


def batch_matmul(x: Tensor, y: Tensor) -> Tensor:
    return ops.bmm(x, y)


def batch_matmul_tb(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_b=True)(x, y)


def batch_matmul_ta(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_a=True)(x, y)


def batch_matmul_tt(x: Tensor, y: Tensor) -> Tensor:
    return ops.BatchMatMul(transpose_a=True, transpose_b=True)(x, y)


def batch_matmul_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.bmm(x, y)


def matmul_old(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul()(x, y)


def matmul_ta(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_a=True)(x, y)


def matmul_tb(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_b=True)(x, y)


def matmul_tt(x: Tensor, y: Tensor) -> Tensor:
    return ops.MatMul(transpose_a=True, transpose_b=True)(x, y)


def dense(x: Tensor, y: Tensor) -> Tensor:
    return ops.dense(x, y)


def dense_bias(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.dense(x, y, z)


def einsum(x: Tensor, y: Tensor) -> Tensor:
    return ops.einsum("bij,bkj->bik", x, y)


def grouped_matmul(x: Tensor, y: Tensor) -> Tensor:
    return GroupedMatmul(split_item=3, group_type=0)([x], [y], None, None, None, None, None, ENDS)[0]


def grouped_matmul_fourth(x: Tensor, y: Tensor) -> Tensor:
    return GroupedMatmulV4()(
        [x], [y], None, None, None, None, None, None, ENDS, None, None, None, 3, 0, 0, 0
    )[0]  # fmt: skip


def fused_attention(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, input_layout="BNSD")
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, None)[3]


def fused_attention_flat(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, input_layout="BSH")
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, None)[3]


def fused_attention_causal(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    kernel = nn_ops.FlashAttentionScore(4, scale_value=0.25, next_tokens=0, input_layout="BNSD", sparse_mode=2)
    return kernel(x.astype(ms.float16), y.astype(ms.float16), z.astype(ms.float16), None, None, None, CAUSAL)[3]


def softmax(x: Tensor) -> Tensor:
    return ops.softmax(x, -1)


def log_softmax(x: Tensor) -> Tensor:
    return ops.log_softmax(x, -1)


def log_softmax_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.log_softmax(x, -1)


def total(x: Tensor) -> Tensor:
    return ops.sum(x, 1)


def total_old(x: Tensor) -> Tensor:
    return ops.ReduceSum()(x, 1)


def total_of_all(x: Tensor) -> Tensor:
    return ops.ReduceSum(keep_dims=True)(x)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1)


def mean_kept(x: Tensor) -> Tensor:
    return ops.mean(x, -1, True)


def mean_extended(x: Tensor) -> Tensor:
    return mint.mean(x, -1, True)


def reduce_max(x: Tensor) -> Tensor:
    return ops.ReduceMax()(x, -1)


def reduce_min(x: Tensor) -> Tensor:
    return ops.ReduceMin()(x, -1)


def max_with_place(x: Tensor) -> Tensor:
    return ops.max(x, -1)[0]


def max_dim(x: Tensor) -> Tensor:
    return mint.max(x, -1)[0]


def min_with_place(x: Tensor) -> Tensor:
    return ops.min(x, -1)[0]


def min_dim(x: Tensor) -> Tensor:
    return mint.min(x, -1)[0]


def variance(x: Tensor) -> Tensor:
    return ops.var(x, -1)


def vector_norm(x: Tensor) -> Tensor:
    return mint.norm(x)


def top_few(x: Tensor) -> Tensor:
    return ops.topk(x, 2)[0]


def cumsum(x: Tensor) -> Tensor:
    return ops.cumsum(x, 1)


def cumsum_extended(x: Tensor) -> Tensor:
    return mint.cumsum(x, 1)


def cumprod(x: Tensor) -> Tensor:
    return ops.cumprod(x, 1)


def log_sum_exp(x: Tensor) -> Tensor:
    return ops.logsumexp(x, -1)


def layer_norm(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.LayerNorm(-1, -1)(x, y, z)[0]


def layer_norm_extended(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.layer_norm(x, (x.shape[-1],), y, z)


def rms_norm(x: Tensor, y: Tensor) -> Tensor:
    return ops.rms_norm(x, y)[0]


def group_norm(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.group_norm(x.transpose(0, 2, 1), 2, y, z)


def batch_norm(x: Tensor, g: Tensor, s: Tensor, m: Tensor, v: Tensor) -> Tensor:
    return ops.BatchNorm(True)(x, g, s, m, v)[0]


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


def gather(x: Tensor) -> Tensor:
    return ops.gather(x, PLACES, 0)


def gather_inner(x: Tensor) -> Tensor:
    return ops.gather(x, PLACES, 1)


def gather_last(x: Tensor) -> Tensor:
    return ops.gather(x, POINTS, -1)


def gather_elements(x: Tensor) -> Tensor:
    return ops.gather_d(x, 1, POINTS)


def gather_points(x: Tensor) -> Tensor:
    return ops.gather_nd(x, POINTS)


def embedding(x: Tensor) -> Tensor:
    return mint.nn.functional.embedding(PLACES, x)


def index_select(x: Tensor) -> Tensor:
    return mint.index_select(x, 1, PLACES)


def pick_rows(x: Tensor) -> Tensor:
    return x[:, PLACES]


def scatter_add(x: Tensor, y: Tensor) -> Tensor:
    return ops.tensor_scatter_add(x, ROWS, y)


def send_to_experts(x: Tensor) -> Tensor:
    return MoeTokenPermute()(x, ops.zeros((x.shape[0], 2), ms.int32))[0]


def return_from_experts(x: Tensor, y: Tensor) -> Tensor:
    return MoeTokenUnpermute()(x, ops.zeros((x.shape[0],), ms.int32), y)


def argmax(x: Tensor) -> Tensor:
    return ops.argmax(x, -1).astype(ms.float32) * x[..., 0]


def one_hot(x: Tensor) -> Tensor:
    return ops.one_hot(ops.arange(x.shape[0]), x.shape[1], Tensor(1.0), Tensor(0.0)) * x


def cross_entropy(x: Tensor) -> Tensor:
    return ops.cross_entropy(x, ops.zeros((x.shape[0],), ms.int32))


def cross_entropy_of_odds(x: Tensor, y: Tensor) -> Tensor:
    return ops.cross_entropy(x, y)


def cross_entropy_extended(x: Tensor) -> Tensor:
    return mint.nn.functional.cross_entropy(x, ops.zeros((x.shape[0],), ms.int64))


def nll_loss(x: Tensor) -> Tensor:
    return ops.nll_loss(x, ops.zeros((x.shape[0],), ms.int32))


def softmax_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return ops.SoftmaxCrossEntropyWithLogits()(x, y)[0]


def sparse_cross_entropy(x: Tensor) -> Tensor:
    return ops.SparseSoftmaxCrossEntropyWithLogits()(x, ops.zeros((x.shape[0],), ms.int32))


def mean_square_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.mse_loss(x, y)


def binary_cross_entropy(x: Tensor, y: Tensor) -> Tensor:
    return ops.binary_cross_entropy_with_logits(x, y, None, None)


def absolute_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.l1_loss(x, y)


def smooth_absolute_error(x: Tensor, y: Tensor) -> Tensor:
    return ops.smooth_l1_loss(x, y)


def divergence(x: Tensor, y: Tensor) -> Tensor:
    return ops.kl_div(x, y)


def convolution(x: Tensor, y: Tensor) -> Tensor:
    return ops.conv2d(x, y, stride=2, pad_mode="pad", padding=1)


def convolution_grouped(x: Tensor, y: Tensor) -> Tensor:
    return ops.conv2d(x, y, groups=2)


def convolution_bias(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return ops.conv2d(x, y, z)


def convolution_extended(x: Tensor, y: Tensor) -> Tensor:
    return mint.nn.functional.conv2d(x, y)


def max_pool(x: Tensor) -> Tensor:
    return ops.MaxPool(2, 2)(x)


def max_pool_with_places(x: Tensor) -> Tensor:
    return ops.max_pool2d(x, 2)


def average_pool(x: Tensor) -> Tensor:
    return ops.AvgPool(2, 2)(x)


def average_pool_of_volumes(x: Tensor) -> Tensor:
    return ops.avg_pool2d(x, 2)


CASES: dict[str, list[tuple[Any, Shapes]]] = {
    "arithmetic": [
        (add, with_vector), (add_number, one), (add_scaled, with_vector), (subtract, with_column),
        (subtract_from_number, one), (subtract_extended, with_vector), (multiply, with_vector), (multiply_number, one),
        (divide, with_column), (divide_number, one), (divide_old, with_vector), (power, two), (power_constant, one),
        (power_number, one), (power_of_number, one), (maximum, with_vector), (minimum, with_vector),
        (where, with_vector), (select, two), (masked_fill, one), (add_many, two), (bias_add, with_vector),
        (lerp, two), (xdivy, two), (floor, one), (ceil, one), (sign, one), (round_, one), (trunc, one),
        (floor_divide, two), (add_scalar_primitive, one), (subtract_scalar_primitive, one),
    ],
    "elementwise": [
        (absolute, one), (atan, one), (cast, one), (clamp, one), (cosine, one), (sine, one), (dropout, one),
        (dropout_extended, one), (elu, one), (erf, one), (exp, one), (expm1, one), (gelu, one), (gelu_exact, one),
        (gelu_extended, one), (hard_swish, one), (leaky_relu, one), (log, one), (log1p, one), (log_sigmoid, one),
        (mish, one), (negative, one), (normalise_l2, one), (reciprocal, one), (relu, one), (relu6, one), (rsqrt, one),
        (sigmoid, one), (silu, one), (softplus, one), (softplus_extended, one), (sqrt, one), (square, one),
        (swiglu, one), (tanh, one),
    ],
    "matmul": [
        (matmul, lambda b, s, h: [(b, s, h), (h, 6)]), (matmul, lambda b, s, h: [(b, s, h), (b, h, 6)]),
        (matmul, lambda b, s, h: [(s, h), (h, 6)]), (matmul, lambda b, s, h: [(s, h), (b, h, 6)]),
        (matmul, lambda b, s, h: [(b, 3, s, h), (3, h, 6)]), (matmul, lambda b, s, h: [(b, 1, s, h), (b, 3, h, 6)]),
        (matmul, lambda b, s, h: [(b, s, h), (h,)]), (matmul, lambda b, s, h: [(h,), (h, s)]),
        (matmul, lambda b, s, h: [(h,), (b, h, s)]), (matmul, lambda b, s, h: [(s, h), (h,)]),
        (matmul, lambda b, s, h: [(h,), (h,)]), (batch_matmul, lambda b, s, h: [(b, s, h), (b, h, 6)]),
        (batch_matmul_tb, lambda b, s, h: [(b, s, h), (b, 6, h)]),
        (batch_matmul_ta, lambda b, s, h: [(b, 3, h, s), (b, 3, h, 6)]),
        (batch_matmul_tt, lambda b, s, h: [(b, 3, h, s), (b, 3, 6, h)]),
        (batch_matmul_extended, lambda b, s, h: [(b, s, h), (b, h, 6)]),
        (matmul_old, lambda b, s, h: [(s, h), (h, 6)]), (matmul_ta, lambda b, s, h: [(h, s), (h, 6)]),
        (matmul_tb, lambda b, s, h: [(s, h), (6, h)]), (matmul_tt, lambda b, s, h: [(h, s), (6, h)]),
        (dense, lambda b, s, h: [(b, s, h), (6, h)]), (dense, lambda b, s, h: [(s, h), (6, h)]),
        (dense_bias, lambda b, s, h: [(b, s, h), (6, h), (6,)]), (dense_bias, lambda b, s, h: [(s, h), (6, h), (6,)]),
        (einsum, lambda b, s, h: [(b, s, h), (b, 6, h)]),
        (grouped_matmul, lambda b, s, h: [(b * s, h), (3, h, 6)]),
        (grouped_matmul_fourth, lambda b, s, h: [(b * s, h), (3, h, 6)]),
    ],
    "attention": [
        (fused_attention, lambda b, s, h: [(b, 4, s, h)] * 3),
        (fused_attention, lambda b, s, h: [(b, 4, s, h), (b, 2, s, h), (b, 2, s, h)]),
        (fused_attention_flat, lambda b, s, h: [(b, s, 4 * h)] * 3),
        (fused_attention_causal, lambda b, s, h: [(b, 4, s, h)] * 3),
    ],
    "reduction": [
        (softmax, one), (log_softmax, one), (log_softmax_extended, one), (total, one), (total_old, one),
        (total_of_all, one), (mean, one), (mean_kept, one), (mean_extended, one), (reduce_max, one), (reduce_min, one),
        (min_with_place, one), (min_dim, one),
        (max_with_place, one), (max_dim, one), (variance, one), (vector_norm, one), (top_few, one), (cumsum, one),
        (cumsum_extended, one), (cumprod, one), (log_sum_exp, one),
    ],
    "normalisation": [
        (layer_norm, with_gain_and_shift), (layer_norm_extended, with_gain_and_shift), (rms_norm, with_vector),
        (group_norm, with_gain_and_shift), (batch_norm, lambda b, s, h: [(b, h, s, s), (h,), (h,), (h,), (h,)]),
    ],
    "movement": [
        (reshape, one), (transpose, one), (permute, one), (swap, one), (expand, one), (expand_view, one),
        (squeeze, one), (flatten, one), (broadcast, one), (broadcast_view, one), (tile, one), (repeat, one),
        (repeat_extended, one), (concatenate, two), (stack, two), (stack_extended, two), (split_one, one),
        (split_sizes, one), (split_sizes_view, one), (flatten_extended, one), (contiguous, one),
        (split_all, one), (chunk, one), (split_view, one), (unstack, one), (part, one), (row, one), (every_second, one),
        (plain_slice, one), (narrow, one), (pad, one), (pad_last, one), (roll, one), (flip, one), (tril, one),
        (triu, one), (ones_and_zeros, one), (chunk_primitive, one), (split_primitive, one),
        (split_sizes_primitive, one),
    ],
    "indexing": [
        (gather, lambda b, s, h: [(s, h)]), (gather_inner, one), (gather_last, one),
        (gather_elements, lambda b, s, h: [(2, h)]), (gather_points, one), (embedding, lambda b, s, h: [(s, h)]),
        (index_select, one), (pick_rows, one), (scatter_add, lambda b, s, h: [(s, h), (2, h)]), (argmax, one),
        (one_hot, lambda b, s, h: [(s, h)]), (send_to_experts, lambda b, s, h: [(s, h)]),
        (return_from_experts, lambda b, s, h: [(2 * s, h), (s, 2)]),
    ],
    "loss": [
        (cross_entropy, lambda b, s, h: [(s, h)]), (cross_entropy_of_odds, lambda b, s, h: [(s, h), (s, h)]),
        (cross_entropy_extended, lambda b, s, h: [(s, h)]), (nll_loss, lambda b, s, h: [(s, h)]),
        (softmax_cross_entropy, lambda b, s, h: [(s, h), (s, h)]), (sparse_cross_entropy, lambda b, s, h: [(s, h)]),
        (mean_square_error, two), (binary_cross_entropy, two), (absolute_error, two), (smooth_absolute_error, two),
        (divergence, two),
    ],
    "convolution": [
        (convolution, lambda b, s, h: [(b, h, s, s), (6, h, 3, 3)]),
        (convolution_grouped, lambda b, s, h: [(b, h, s, s), (6, h // 2, 3, 3)]),
        (convolution_bias, lambda b, s, h: [(b, h, s, s), (6, h, 2, 2), (6,)]),
        (convolution_extended, lambda b, s, h: [(b, h, s, s), (6, h, 3, 3)]), (max_pool, image),
        (max_pool_with_places, image), (average_pool, image), (average_pool_of_volumes, image),
    ],
}  # fmt: skip
"""By family of rules: functions and the shapes of their operands."""


class CaseCell(nn.Cell):
    """One case on operands that depend on weights, so that all of their gradients are needed."""

    def __init__(self, function: Any, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        self.weights = ms.ParameterTuple(
            [Parameter(Tensor(np.full(shape, 0.5, np.float32)), name=f"w{i}") for i, shape in enumerate(shapes)]
        )

    def construct(self) -> Tensor:
        operands = ()
        for weight in self.weights:
            operands = (*operands, ops.cos(weight))
        return self.function(*operands)


class CaseNetwork(nn.Cell):
    """All cases of one family at one size, each in the cell ``cases.<number>``."""

    def __init__(self, family: str, size: tuple[int, int, int]) -> None:
        super().__init__()
        self.cases = nn.CellList([CaseCell(function, shapes(*size)) for function, shapes in CASES[family]])

    def construct(self, start: Tensor) -> Tensor:
        loss = start
        for case in self.cases:
            loss = loss + ops.sin(case()).sum()
        return loss
