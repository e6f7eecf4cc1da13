"""The example networks: they run, differentiate, and have the published sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.nn.utils import no_init_parameters

from tests.example_families import FAMILIES
from tools.examples import (
    bert,
    blip2,
    deepseek,
    gpt,
    gpt_sharded,
    llama,
    llama_sharded,
    moe,
    palm,
    pangu_alpha,
    swin,
    vision_language,
    vit,
)

BUILDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{name: built for name, built in FAMILIES.items() if name != "deepseek-dropless"},  # its kernels are Ascend's
    "llama-tied": (llama.factory, {"tied": True, "kv_heads": 4, "dtype": "float16"}),
    "gpt-alibi": (gpt.factory, {"alibi": True, "tied": False, "heads": 2}),
    "llama-sharded": (llama_sharded.factory, {"tensor_parallel": 2, "sequence_parallel": True}),
    "gpt-sharded": (gpt_sharded.factory, {"tensor_parallel": 2, "sequence_parallel": True}),
    "vision-language": (vision_language.factory, {}),
}
EXTRA_LOSS = {"bert": math.log(2), "deepseek": deepseek.PREDICTION_WEIGHT * math.log(256)}
"""BERT also guesses between two classes, DeepSeek-V3 guesses a second token."""
CLASSES = {"vit": 10, "swin": 10}


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
    # An untrained network guesses uniformly among 256 tokens, or the classes of an image.
    expected = math.log(CLASSES.get(name, 256)) + EXTRA_LOSS.get(name, 0.0)
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


@pytest.mark.parametrize(
    ("build", "size", "published"),
    [
        (llama.factory, "qwen2.5_0.5b", 494_032_768),
        (llama.factory, "qwen2.5_7b", 7_615_616_512),
        (llama.factory, "qwen2.5_72b", 72_706_203_648),
        (gpt.factory, "bloom_7b", 7_069_016_064),
        (vit.factory, "b16", 86_567_656),
        (vit.factory, "l16", 304_326_632),
        (vit.factory, "h14", 632_045_800),
        (swin.factory, "t", 28_288_354),
        (swin.factory, "b", 87_768_224),
    ],
)
def test_sizes_are_the_published_ones(build: Callable[..., Any], size: str, published: int) -> None:
    assert parameter_count(build, size=size) == published


@pytest.mark.parametrize(
    ("build", "size", "published"),
    [
        # arXiv 2204.02311, table 1.
        (palm.factory, "8b", 8.63e9),
        (palm.factory, "62b", 62.50e9),
        (palm.factory, "540b", 540.35e9),
        # arXiv 2201.11990.
        (gpt.factory, "mt_nlg_530b", 530e9),
        # arXiv 2104.12369, table 1.
        (pangu_alpha.factory, "2.6b", 2.6e9),
        (pangu_alpha.factory, "200b", 207.0e9),
        # arXiv 2103.14030, table 1.
        (swin.factory, "l", 197e6),
        # arXiv 2301.12597, table 1: all parts together.
        (blip2.factory, "opt_2.7b", 3.8e9),
    ],
)
def test_sizes_round_to_the_published_ones(build: Callable[..., Any], size: str, published: float) -> None:
    assert parameter_count(build, size=size) == pytest.approx(published, rel=0.02)


def test_deepseek_has_the_published_number_of_weights() -> None:
    # arXiv 2412.19437: 671B in all, and 14B of the multi-token prediction with the table and head it shares.
    assert parameter_count(deepseek.factory, size="671b", mtp=False) == pytest.approx(671e9, rel=0.001)
    whole = parameter_count(deepseek.factory, size="671b")
    shared = 2 * 129280 * 7168
    assert whole - 671e9 + shared == pytest.approx(14e9, rel=0.05)


def test_llava_trains_all_but_its_tower() -> None:
    with no_init_parameters():
        network, _ = vision_language.factory(size="llava_7b", layers=1)
    frozen = [weight.name for weight in network.get_parameters() if not weight.requires_grad]
    assert frozen and all(name.startswith("vision.") for name in frozen)
    assert {weight.name.split(".")[0] for weight in network.trainable_params()} == {
        "projector", "embedding", "blocks", "norm", "head",
    }  # fmt: skip


def test_blip2_trains_its_q_former_only() -> None:
    with no_init_parameters():
        network, _ = blip2.factory(size="opt_2.7b")
    trained = network.trainable_params()
    assert all(weight.name.startswith("projector.") for weight in trained)
    # arXiv 2301.12597, table 1: 104M, without the text half of the Q-Former.
    assert sum(math.prod(weight.shape) for weight in trained) == pytest.approx(104e6, rel=0.04)


def test_capacity_drops_tokens_and_keeps_order() -> None:
    # Two experts of one seat each for four tokens that all choose expert 1 first: the first token gets the seat.
    ms.set_context(mode=ms.GRAPH_MODE)
    layer = moe.CapacityExperts(hidden=4, ffn=8, experts=2, capacity_factor=0.5, dtype=ms.float32)
    states = Tensor(np.arange(16, dtype=np.float32).reshape(1, 4, 4))
    chosen = Tensor(np.array([[1], [1], [1], [1]], np.int32))
    result = layer(states, chosen, Tensor(np.full((4, 1), 2.0, np.float32))).asnumpy()[0]
    gate, up, down = (weight.asnumpy()[1] for weight in (layer.experts.gate, layer.experts.up, layer.experts.down))
    inner = states.asnumpy()[0, 0] @ gate
    expected = 2.0 * ((inner / (1 + np.exp(-inner)) * (states.asnumpy()[0, 0] @ up)) @ down)
    np.testing.assert_allclose(result[0], expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(result[1:], 0.0)


def test_shifted_windows_see_their_own_region_only() -> None:
    # 8 x 8 patches in windows of 4, shifted by 2: the last window holds four regions of four patches.
    mask = swin.shifted_mask(8, 4, 2)
    assert mask.shape == (4, 1, 16, 16)
    assert [(window == 0).sum() for window in mask] == [16 * 16, 2 * 8 * 8, 2 * 8 * 8, 4 * 4 * 4]


def test_windows_come_back_to_their_places() -> None:
    class Same(nn.Cell):
        def construct(self, states: Tensor) -> Tensor:
            return states

    states = Tensor(np.arange(2 * 64 * 3, dtype=np.float32).reshape(2, 64, 3))
    for shift in (0, 2):
        np.testing.assert_array_equal(swin.Windows(8, 4, shift, Same())(states).asnumpy(), states.asnumpy())


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
    assert block == ["attention.core.weights_dropout", "attention_dropout", "feed_forward_dropout"]
    assert network.training


def test_later_tokens_do_not_change_earlier_logits() -> None:
    for build in (llama.factory, gpt.factory, palm.factory, deepseek.factory):
        network, (ids, *_) = build(layers=1)
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


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (palm.factory, {"head_size": 5}, "head_size is 5; rotary positions need an even head size"),
        (swin.factory, {"window": 3}, "stage 0 has 16 x 16 patches, which windows of 3"),
        (blip2.factory, {"query_heads": 5}, "query_hidden .48. must be a multiple of query_heads .5."),
        (deepseek.factory, {"active": 9}, "active .9. must not exceed experts .8."),
        (deepseek.factory, {"dropless": True}, "dropless=True needs dtype float16 or bfloat16"),
    ],
)
def test_unusable_settings_of_other_networks_are_named(
    build: Callable[..., Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(**settings)
