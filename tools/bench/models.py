"""Layer tables of public models on public parallel layouts, from closed formulas and a hardware file.

For s tokens, b samples of a micro-batch, h hidden, q query width, k key width, a heads, f feed-forward, v vocabulary,
t tensor parallel, d data parallel; 16-bit activations, sequence parallel:

- Layer, forward: matrix products 2bs(h(q + 2k) + qh) and 6bshf (4bshf without a gate); attention 2bs^2 q causal with
  flash attention, 4bs^2 q without; element-wise traffic; two gathers and two scatters of 2bsh. Backward: products
  twice, flash attention 2.5 times, element-wise twice, the same communication.
- Saved by a layer with flash attention: (sb/t)(4h + 4q + 4k + 4a + 6f), and the inputs of its two products, 4hsb where
  gathered inputs are kept, 4hsb/t where they are gathered again (`comm`). `select` drops the gated product, 2fsb/t.
  Without flash attention: (sb/t)(34h + 5as), `select` drops 5as (Korthikanti et al., arXiv 2205.05198).
  `full` keeps the input, 2hsb/t.
- Weights: 6 + 12/d bytes a parameter (16-bit weights, 32-bit gradients, optimizer sharded over data parallel).

Element-wise traffic and 2 GB of constants a stage are assumptions; so are the efficiencies of the hardware file.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspore_bmpipe.costs.hardware import Hardware, Link
from mindspore_bmpipe.problem import Option, Problem, Run

_LAUNCHES = 20
_STAGE_CONSTANT_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Model:
    """A dense decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int
    gated: bool
    """Whether the feed-forward has a gate (SwiGLU)."""
    flash: bool
    """Whether attention keeps no scores."""
    source: str


@dataclass(frozen=True)
class Layout:
    """How it is trained."""

    model: Model
    data_parallel: int
    tensor_parallel: int
    stages: int
    chunks: int
    micro_batches: int
    samples: int
    """Samples of a micro-batch."""
    sequence: int
    source: str
    note: str = ""
    """What the source does not say."""
    keeps_gathered: bool = True
    """Whether gathered inputs of products are kept; Megatron-LM gathers them again."""

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return self.data_parallel * self.tensor_parallel * self.stages


def _gather_ms(link: Link, size_bytes: float, ranks: int) -> float:
    """One all-gather or reduce-scatter."""
    return (ranks - 1) * link.latency_ms + (ranks - 1) / ranks * size_bytes / link.bandwidth_bytes_per_ms


def _layer(layout: Layout, hardware: Hardware) -> Run:
    model, ranks = layout.model, layout.tensor_parallel
    tokens, hidden = layout.samples * layout.sequence, model.hidden
    query, key = hidden, hidden // model.heads * model.key_heads
    rate = hardware.rate("matmul", "bfloat16") * ranks
    weights = hidden * (query + 2 * key) + query * hidden + (3 if model.gated else 2) * hidden * model.feed_forward
    products = 2 * tokens * weights / rate
    attention = (2 if model.flash else 4) * tokens * layout.sequence * query / rate
    shard = tokens / ranks
    gate = 6 * shard * model.feed_forward / hardware.bytes_per_ms
    scores = 0.0 if model.flash else 10 * shard * layout.sequence * model.heads / hardware.bytes_per_ms
    # Two norms, two additions, rotation of queries and keys, the activation.
    vector = shard * (20 * hidden + 4 * (query + key)) / hardware.bytes_per_ms + gate + scores
    gather = _gather_ms(hardware.intra_node, 2 * tokens * hidden, ranks) if ranks > 1 else 0.0
    launches = _LAUNCHES * hardware.launch_ms
    forward = products + attention + vector + 4 * gather + launches
    backward = 2 * products + (2.5 if model.flash else 2) * attention + 2 * vector + 4 * gather + 2 * launches
    inputs = 4 * shard * hidden
    gathered = 4 * tokens * hidden if layout.keeps_gathered else inputs
    if model.flash:
        dropped, again = 2 * shard * model.feed_forward, gate
        rest = shard * (
            4 * hidden + 4 * query + 4 * key + 4 * model.heads + (6 if model.gated else 4) * model.feed_forward
        )
    else:
        dropped, again = 5 * shard * model.heads * layout.sequence, attention + scores
        rest = shard * 34 * hidden - inputs + dropped
    options = [
        _option("none", rest + gathered, 0.0, 0.0),
        _option("select", rest + gathered - dropped, again, dropped),
    ]
    if gathered > inputs:
        options.append(_option("comm", rest + inputs, 2 * gather, gathered))
        options.append(_option("both", rest + inputs - dropped, 2 * gather + again, gathered + dropped))
    options.append(_option("full", 2 * shard * hidden, forward, rest + gathered))
    static = (weights + 2 * hidden) / ranks * (6 + 12 / layout.data_parallel)
    return Run("layer", model.layers, forward, backward, round(static), tuple(options))


def _option(name: str, saved: float, extra_ms: float, working_set: float) -> Option:
    return Option(name, round(saved), extra_ms, round(working_set))


def problem_of(layout: Layout, hardware: Hardware) -> Problem:
    """The planning problem, with the device's memory as limit."""
    model, ranks = layout.model, layout.tensor_parallel
    tokens, hidden = layout.samples * layout.sequence, model.hidden
    shard = tokens / ranks
    gather = _gather_ms(hardware.intra_node, 2 * tokens * hidden, ranks) if ranks > 1 else 0.0
    table = round(model.vocabulary * hidden / ranks * (6 + 12 / layout.data_parallel))
    look_up = 4 * shard * hidden / hardware.bytes_per_ms + gather + hardware.launch_ms
    logits = 4 * shard * model.vocabulary
    product = 2 * tokens * hidden * model.vocabulary / (hardware.rate("matmul", "bfloat16") * ranks)
    loss = 3 * logits / hardware.bytes_per_ms + gather + 4 * hardware.launch_ms
    head = _option("none", 4 * shard * hidden + logits, 0.0, logits)
    runs = (
        Run("embedding", 1, look_up, look_up, table, (Option("none", 0, 0.0),)),
        _layer(layout, hardware),
        Run("head", 1, product + loss, 2 * product + loss, table, (head,)),
    )
    one_node = layout.tensor_parallel * layout.stages <= hardware.devices_per_node
    link = hardware.intra_node if one_node else hardware.inter_node
    return Problem(
        runs=runs,
        schedule="1f1b" if layout.chunks == 1 else "interleaved",
        stages=layout.stages,
        chunks=layout.chunks,
        micro_batches=layout.micro_batches,
        memory_limit_bytes=(hardware.memory_capacity_bytes,) * layout.stages,
        stage_constant_bytes=_STAGE_CONSTANT_BYTES,
        transfer_ms=link.transfer_ms(2 * shard * hidden),
    )


_LLAMA3 = "arXiv 2407.21783, table 3"
LLAMA2_7B = Model("LLaMA-2 7B", 32, 4096, 32, 32, 11008, 32000, True, True, "arXiv 2307.09288")
YI_34B = Model("Yi 34B", 60, 7168, 56, 8, 20480, 64000, True, True, "arXiv 2403.04652")
LLAMA2_70B = Model("LLaMA-2 70B", 80, 8192, 64, 8, 28672, 32000, True, True, "arXiv 2307.09288")
LLAMA3_70B = Model("LLaMA-3 70B", 80, 8192, 64, 8, 28672, 128256, True, True, _LLAMA3)
LLAMA3_405B = Model("LLaMA-3.1 405B", 126, 16384, 128, 8, 53248, 128256, True, True, _LLAMA3)
TELECHAT_115B = Model("TeleChat2 115B", 96, 8192, 64, 8, 40960, 131072, True, True, "its MindFormers YAML")
GPT3_175B = Model("GPT-3 175B", 96, 12288, 96, 96, 49152, 51200, False, False, "arXiv 2205.05198, table 3")
GPT_1T = Model("GPT 1T", 128, 25600, 160, 160, 102400, 51200, False, False, "arXiv 2205.05198, table 3")
PANGU_200B = Model("PanGu-alpha 200B", 64, 16384, 128, 128, 65536, 40000, False, False, "arXiv 2104.12369, table 1")
PANGU_ULTRA = Model("Pangu Ultra 135B", 94, 12288, 96, 8, 28672, 153376, True, True, "arXiv 2504.07866, section 2")

_REPOSITORY = "MindFormers (github.com/mindspore-lab/mindformers)"
LAYOUTS = {
    "llama2-7b": Layout(
        LLAMA2_7B, 16, 1, 4, 1, 64, 2, 2048,
        f"{_REPOSITORY} r0.8, configs/llama2/run_llama2_7b_910b_finetune.yaml",
        "eight times the replicas, 64 devices for 8",
    ),
    "yi-34b": Layout(
        YI_34B, 4, 4, 4, 1, 56, 1, 4096,
        f"{_REPOSITORY} r1.2.0, research/yi/pretrain_yi_34b.yaml",
        "four times the replicas, 64 devices for 16",
    ),
    "llama2-70b": Layout(
        LLAMA2_70B, 2, 4, 8, 1, 256, 1, 4096,
        f"{_REPOSITORY} r1.3.0, configs/llama2/pretrain_llama2_70b_bf16_64p.yaml",
    ),
    "llama3-70b": Layout(
        LLAMA3_70B, 1, 8, 8, 1, 256, 1, 8192,
        f"{_REPOSITORY} r1.3.0, research/llama3/pretrain_llama3_70b.yaml",
    ),
    "telechat-115b": Layout(
        TELECHAT_115B, 8, 8, 8, 3, 8, 1, 8192,
        f"{_REPOSITORY} r1.3.0, research/telechat2/finetune_telechat_115b.yaml",
    ),
    "gpt3-175b": Layout(
        GPT3_175B, 1, 8, 8, 3, 64, 1, 2048, "arXiv 2205.05198, table 3: batch 64 on 64 devices, 3 chunks",
        keeps_gathered=False,
    ),
    "gpt-1t": Layout(
        GPT_1T, 1, 8, 64, 1, 512, 1, 2048, "arXiv 2205.05198, table 3: batch 512 on 512 devices",
        keeps_gathered=False,
    ),
    "pangu-200b": Layout(
        PANGU_200B, 16, 8, 16, 1, 32, 1, 1024,
        "arXiv 2104.12369 (2048 devices); stages, micro-batches and tensor parallel: set_parse_200B of "
        "gitee.com/mindspore/models, official/nlp/Pangu_alpha",
    ),
    "pangu-ultra-135b": Layout(
        PANGU_ULTRA, 128, 8, 8, 1, 32, 1, 4096, "arXiv 2504.07866, section 4: 8192 devices, 128 x 8 x 8",
        "micro-batches, sequence length and one chunk are assumptions",
    ),
    "llama3-405b-8k": Layout(
        LLAMA3_405B, 64, 8, 16, 1, 32, 1, 8192, "arXiv 2407.21783, table 4: 8192 devices, 16 M tokens a step",
    ),
    "llama3-405b-16k": Layout(
        LLAMA3_405B, 128, 8, 16, 1, 16, 1, 8192, "arXiv 2407.21783, table 4: 16384 devices, 16 M tokens a step",
    ),
}  # fmt: skip
"""Layouts by name, smallest model first."""
