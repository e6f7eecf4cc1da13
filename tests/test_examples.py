"""The example networks: they run, differentiate, and have the published sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.nn.utils import no_init_parameters

from tools.examples import bert, gpt, gpt_sharded, llama, llama_sharded, vision_language

BUILDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (llama.factory, {}),
    "llama-tied": (llama.factory, {"tied": True, "kv_heads": 4, "dtype": "float16"}),
    "gpt": (gpt.factory, {}),
    "gpt-alibi": (gpt.factory, {"alibi": True, "tied": False, "heads": 2}),
    "llama-sharded": (llama_sharded.factory, {"tensor_parallel": 2}),
    "gpt-sharded": (gpt_sharded.factory, {"tensor_parallel": 2}),
    "bert": (bert.factory, {}),
    "vision-language": (vision_language.factory, {}),
}


def parameter_count(build: Callable[..., Any], **settings: Any) -> int:
    with no_init_parameters():
        network, _ = build(**settings)
    return sum(math.prod(parameter.shape) for parameter in network.get_parameters())


def decoder_count(layers: int, hidden: int, ffn: int, vocab: int, kv_share: float = 1.0, tied: bool = False) -> float:
    """Count by hand: query and output h^2 each, key and value h^2 * kv_share each, three h*f, two norms a layer."""
    layer = 2 * hidden**2 + 2 * hidden**2 * kv_share + 3 * hidden * ffn + 2 * hidden
    return layers * layer + hidden + vocab * hidden * (1 if tied else 2)


@pytest.mark.parametrize("name", BUILDS)
def test_tiny_network_has_finite_loss_and_gradients(name: str) -> None:
    build, settings = BUILDS[name]
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    network, inputs = build(**settings)
    parameters = network.trainable_params()
    loss, gradients = ms.value_and_grad(network, None, parameters)(*inputs)
    assert loss.shape == ()
    # An untrained network guesses uniformly among 256 tokens; BERT adds a guess between two classes.
    expected = math.log(256) + (math.log(2) if name == "bert" else 0)
    assert float(loss.asnumpy()) == pytest.approx(expected, abs=0.35)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        values = gradient.astype(ms.float32).asnumpy()
        assert values.shape == parameter.shape
        assert np.isfinite(values).all(), parameter.name
        assert np.abs(values).sum() > 0, parameter.name


@pytest.mark.parametrize(
    ("size", "published"),
    [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)],
)
def test_llama_sizes_are_the_published_ones(size: str, published: int) -> None:
    preset = llama.PRESETS[size]
    by_hand = decoder_count(
        preset["layers"], preset["hidden"], preset["ffn"], 32000, preset["kv_heads"] / preset["heads"]
    )
    assert by_hand == published
    assert parameter_count(llama.factory, size=size) == published


def test_tied_head_has_no_weight_of_its_own() -> None:
    untied = parameter_count(llama.factory)
    assert untied - parameter_count(llama.factory, tied=True) == 256 * 64


def test_gpt_size_follows_the_layer_formula() -> None:
    # 12 h^2 + 13 h a layer, the final norm, and embeddings of 51200 tokens and 2048 positions.
    hidden, layers = 12288, 96
    expected = layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden + (51200 + 2048) * hidden
    assert parameter_count(gpt.factory, size="175b") == expected


def test_bloom_size_is_the_published_one() -> None:
    assert parameter_count(gpt.factory, size="bloom_176b") == 176_247_271_424


@pytest.mark.parametrize(("size", "published"), [("base", 110_106_428), ("large", 336_226_108)])
def test_bert_sizes_are_the_published_ones(size: str, published: int) -> None:
    assert parameter_count(bert.factory, size=size) == published


def test_gpt_puts_dropout_where_the_activation_formula_counts_it() -> None:
    network, _ = gpt.factory()
    names = [name for name, cell in network.cells_and_names() if type(cell).__name__ == "Dropout"]
    block = [name.removeprefix("blocks.0.") for name in names if name.startswith("blocks.0.")]
    assert block == ["attention.weights_dropout", "attention_dropout", "feed_forward_dropout"]
    assert network.training


def test_later_tokens_do_not_change_earlier_logits() -> None:
    for build in (llama.factory, gpt.factory):
        network, (ids, _) = build(layers=1)
        network.set_train(False)
        changed = ids.asnumpy().copy()
        changed[:, -1] = (changed[:, -1] + 7) % 256

        def states(tokens: np.ndarray, network: Any = network) -> np.ndarray:
            embedded = network.embedding(Tensor(tokens))
            return network.blocks[0](embedded).asnumpy()

        before, after = states(ids.asnumpy()), states(changed)
        np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
        assert np.abs(before[:, -1] - after[:, -1]).max() > 0


def test_padding_does_not_change_the_loss_of_bert() -> None:
    network, inputs = bert.factory(layers=1, dropout=0.0)
    ids, types, present, labels, sentences = inputs
    changed = np.where(present.asnumpy() == 0, 5, ids.asnumpy()).astype(np.int32)
    assert (changed != ids.asnumpy()).any()
    loss = network(*inputs)
    assert float(network(Tensor(changed), types, present, labels, sentences)) == pytest.approx(float(loss), abs=1e-6)


def test_alibi_slopes_follow_the_paper() -> None:
    np.testing.assert_allclose(gpt.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    # 12 heads: the eight slopes of eight heads, then the odd ones of sixteen.
    np.testing.assert_allclose(gpt.alibi_slopes(12)[8:], [2.0 ** (-i / 2) for i in (1, 3, 5, 7)])


def test_blocks_take_other_batches_and_lengths_than_the_inputs_given() -> None:
    network, _ = llama.factory()
    ids = Tensor(np.arange(3 * 9, dtype=np.int32).reshape(3, 9))
    assert network(ids, ids).shape == ()


def test_flash_attention_compiles_without_its_kernel(tmp_path: Path) -> None:
    network, inputs = llama.factory(flash=True, dtype="float16")
    ms.export(network, *inputs, file_name=str(tmp_path / "flash"), file_format="MINDIR")
    assert b"FlashAttentionScore" in (tmp_path / "flash.mindir").read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "8b"}, "unknown size '8b'; choose one of tiny, 7b, 13b, 70b"),
        ({"layer": 3}, "unknown settings layer"),
        ({"dtype": "int8"}, "unknown dtype 'int8'"),
        ({"heads": 5}, "hidden .64. must be a multiple of heads .5."),
        ({"kv_heads": 3}, "heads .4. must be a multiple of kv_heads .3."),
        ({"flash": True}, "flash=True needs dtype float16 or bfloat16"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llama.factory(**settings)
