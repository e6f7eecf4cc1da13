"""Networks in functional style, as ported ones are: MindSpore gives their operations the scope of the first use."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer


def weight(*shape: int) -> Parameter:
    return Parameter(initializer("normal", shape))


class Scale(nn.Cell):
    """RMS norm of functions and operators only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (width,)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keep_dims=True)
        return x * ops.rsqrt(variance + 1e-5) * self.weight


class MaskedAttention(nn.Cell):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.number = heads
        self.q = nn.Dense(width, width, has_bias=False)
        self.k = nn.Dense(width, width, has_bias=False)
        self.v = nn.Dense(width, width, has_bias=False)
        self.o = nn.Dense(width, width, has_bias=False)

    def heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.reshape(batch, length, self.number, width // self.number).transpose(0, 2, 1, 3)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        scores = ops.masked_fill(ops.matmul(q, k.swapaxes(-1, -2)) * 0.25, mask, -1e4)
        mixed = ops.matmul(ops.softmax(scores, -1), v).transpose(0, 2, 1, 3)
        return self.o(mixed.reshape(x.shape))


class Gated(nn.Cell):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.both = nn.Dense(width, 2 * inner, has_bias=False)
        self.down = nn.Dense(inner, width, has_bias=False)

    def construct(self, x: Tensor) -> Tensor:
        gate, value = ops.split(self.both(x), self.down.in_channels, -1)
        return self.down(ops.silu(gate) * value)


class Layer(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = Scale(width)
        self.attention = MaskedAttention(width, 4)
        self.between = Scale(width)
        self.gated = Gated(width, 96)

    def construct(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), mask)
        return x + self.gated(self.between(x))


class Embedded(nn.Cell):
    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.place = weight(length, width)

    def construct(self, ids: Tensor) -> Tensor:
        return self.token(ids) + self.place


class Decoder(nn.Cell):
    """Pre-norm decoder; its loss is the network's own code, not a cell."""

    def __init__(self, layers: int = 3, width: int = 64, vocab: int = 128, length: int = 16) -> None:
        super().__init__()
        self.embedded = Embedded(vocab, length, width)
        self.layers = nn.CellList([Layer(width) for _ in range(layers)])
        self.norm = Scale(width)
        self.head = nn.Dense(width, vocab, has_bias=False)
        self.mask = Tensor(np.triu(np.ones((length, length), bool), 1))

    def construct(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedded(ids)
        for layer in self.layers:
            x = layer(x, self.mask)
        logits = self.head(self.norm(x))
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class Linear(nn.Cell):
    """No primitive of its own: the scope of every projection is that of the first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = weight(outputs, inputs)
        self.bias = weight(outputs)

    def construct(self, x: Tensor) -> Tensor:
        return mint.nn.functional.linear(x, self.weight, self.bias)


class Norm(nn.Cell):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.gain = weight(width)
        self.shift = weight(width)

    def construct(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, (self.width,), self.gain, self.shift)


class Rotation(nn.Cell):
    """Holds no weight, and computes its table from a constant."""

    def __init__(self, length: int, size: int) -> None:
        super().__init__()
        self.angles = Tensor(np.ones((length, size), np.float32))

    def construct(self, x: Tensor) -> Tensor:
        first, second = ops.split(x, x.shape[-1] // 2, -1)
        return x * ops.cos(self.angles) + ops.cat((-second, first), -1) * ops.sin(self.angles)


class CrossAttention(nn.Cell):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.number = heads
        self.q = Linear(width, width)
        self.kv = Linear(width, 2 * width)
        self.o = Linear(width, width)
        self.rotate_query = Rotation(length, width // heads)
        self.rotate_key = Rotation(length, width // heads)
        self.drop = nn.Dropout(p=0.1)

    def heads(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return ops.transpose(ops.reshape(x, (batch, length, self.number, width // self.number)), (0, 2, 1, 3))

    def construct(self, x: Tensor, memory: Tensor) -> Tensor:
        key, value = mint.chunk(self.kv(memory), 2, -1)
        key, value = self.rotate_key(self.heads(key)), self.heads(value)
        query = self.rotate_query(self.heads(self.q(x)))
        weights = self.drop(ops.softmax(ops.matmul(query, key.swapaxes(2, 3)) / 4.0, -1))
        return self.o(ops.matmul(weights, value).transpose(0, 2, 1, 3).reshape(x.shape))


class Expert(nn.Cell):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = Linear(width, inner)
        self.down = Linear(inner, width)

    def construct(self, x: Tensor) -> Tensor:
        return self.down(ops.gelu(self.up(x)))


class Mixture(nn.Cell):
    """Experts side by side: none depends on another."""

    def __init__(self, width: int, inner: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.gate = Linear(width, count)
        self.experts = nn.CellList([Expert(width, inner) for _ in range(count)])

    def construct(self, x: Tensor) -> Tensor:
        shares = ops.softmax(self.gate(x), -1)
        result = self.experts[0](x) * shares[..., 0:1]
        for number in range(1, self.count):
            result = result + self.experts[number](x) * shares[..., number : number + 1]
        return result


class EncoderLayer(nn.Cell):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.attention = CrossAttention(width, heads, length)
        self.first_norm = Norm(width)
        self.mixture = Mixture(width, 32, 3)
        self.second_norm = Norm(width)

    def construct(self, x: Tensor) -> Tensor:
        x = self.first_norm(x + self.attention(x, x))
        return self.second_norm(x + self.mixture(x))


class DecoderLayer(nn.Cell):
    def __init__(self, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.itself = CrossAttention(width, heads, length)
        self.across = CrossAttention(width, heads, length)
        self.expert = Expert(width, 64)
        self.norms = nn.CellList([Norm(width) for _ in range(3)])

    def construct(self, x: Tensor, memory: Tensor) -> Tensor:
        normed = self.norms[0](x)
        x = x + self.itself(normed, normed)
        x = x + self.across(self.norms[1](x), memory)
        return ops.relu(x + self.expert(self.norms[2](x)))


class Table(nn.Cell):
    def __init__(self, vocab: int, length: int, width: int) -> None:
        super().__init__()
        self.token = weight(vocab, width)
        self.place = weight(length, width)

    def construct(self, ids: Tensor) -> Tensor:
        return ops.dropout(ops.gather(self.token, ids, 0) + self.place, 0.1)


class Translator(nn.Cell):
    """Encoder with experts and decoder with cross-attention, all of functions."""

    def __init__(self, layers: int = 3, width: int = 32, heads: int = 2, vocab: int = 64, length: int = 16) -> None:
        super().__init__()
        self.source = Table(vocab, length, width)
        self.target = Table(vocab, length, width)
        self.encoder = nn.SequentialCell([EncoderLayer(width, heads, length) for _ in range(layers)])
        self.decoder = nn.CellList([DecoderLayer(width, heads, length) for _ in range(layers)])
        self.norm = Norm(width)
        self.head = Linear(width, vocab)

    def construct(self, ids: Tensor, labels: Tensor) -> Tensor:
        memory = self.encoder(self.source(ids))
        x = self.target(ids)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = self.head(self.norm(x))
        return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def named(network: Any) -> Any:
    """Give every weight the name of its place, as saving a checkpoint would."""
    for name, parameter in network.parameters_and_names():
        parameter.name = name
    return network


def decoder() -> tuple[Decoder, tuple[Tensor, Tensor]]:
    return named(Decoder()), token_ids(128)


def translator() -> tuple[Translator, tuple[Tensor, Tensor]]:
    return named(Translator()), token_ids(64)


def token_ids(vocab: int) -> tuple[Tensor, Tensor]:
    ids = Tensor(np.arange(32, dtype=np.int32).reshape(2, 16) % vocab, ms.int32)
    return ids, ids


class Wrapper(nn.Cell):
    """A cell around a whole network, with or without a part of its own in parameter names."""

    def __init__(self, network: nn.Cell, prefix: bool) -> None:
        super().__init__(auto_prefix=prefix)
        self.network = network

    def construct(self, *inputs: Tensor) -> Tensor:
        return self.network(*inputs) * 2


class Regression(nn.Cell):
    """For wrappers that add the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(4, 4)
        self.layers = nn.CellList([nn.Dense(4, 4) for _ in range(2)])

    def construct(self, x: Tensor) -> Tensor:
        x = ops.relu(self.first(x))
        for layer in self.layers:
            x = ops.relu(layer(x))
        return x


class Normalised(nn.Cell):
    """Convolution and batch normalisation, whose running averages are weights that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 2)
        self.norm = nn.BatchNorm2d(3)

    def construct(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x)).sum()
