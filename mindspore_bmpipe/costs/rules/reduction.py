"""Reductions and normalisations: every input element is met a fixed number of times."""

from __future__ import annotations

from mindspore_bmpipe.costs.rules.base import Engine, OperationView, Rule, Work, elements, moved
from mindspore_bmpipe.costs.rules.elementwise import TRANSCENDENTAL_FLOPS

NORM_FORWARD_FLOPS = 8
"""Mean, centred square, its mean, scale, shift: about eight operations for every element."""
NORM_BACKWARD_FLOPS = 16
"""Gradients of input, scale and shift: about twice the forward."""
SOFTMAX_FLOPS = TRANSCENDENTAL_FLOPS + 4
"""Maximum, difference, exponential, sum, quotient."""
SOFTMAX_GRADIENT_FLOPS = 4
"""Product, sum, difference, product."""


def _per_input(flops: int) -> Rule:
    def rule(view: OperationView) -> Work:
        return moved(view, Engine.VECTOR, flops * elements(view.inputs[0]))

    return rule


REDUCTIONS = (
    "ReduceSum", "SumExt", "ReduceMean", "MeanExt", "ReduceMax", "ReduceMin", "Max", "Min", "ReduceAll", "ReduceAny",
    "ReduceProd", "BiasAddGrad", "ArgMaxWithValue", "ArgMinWithValue", "Argmax", "Argmin", "ArgMaxExt", "CumSum",
    "CumsumExt", "CumProd", "MaxDim", "MinDim", "LinalgVectorNorm", "AvgPool", "AvgPoolGrad", "AvgPool3D",
    "AvgPool3DGrad", "MaxPool", "MaxPoolGrad", "MaxPoolWithArgmaxV2", "MaxPoolGradWithArgmaxV2", "ReduceStd", "L2Loss",
    "SquareSumAll", "Col2Im",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(REDUCTIONS, _per_input(1)),
    "Softmax": _per_input(SOFTMAX_FLOPS),
    "LogSoftmax": _per_input(SOFTMAX_FLOPS),
    "LogSoftmaxExt": _per_input(SOFTMAX_FLOPS),
    "SoftmaxBackward": _per_input(SOFTMAX_GRADIENT_FLOPS),
    "LogSoftmaxGrad": _per_input(SOFTMAX_GRADIENT_FLOPS + TRANSCENDENTAL_FLOPS),
    "LayerNorm": _per_input(NORM_FORWARD_FLOPS),
    "LayerNormExt": _per_input(NORM_FORWARD_FLOPS),
    "LayerNormGrad": _per_input(NORM_BACKWARD_FLOPS),
    "LayerNormGradExt": _per_input(NORM_BACKWARD_FLOPS),
    "RmsNorm": _per_input(NORM_FORWARD_FLOPS),
    "RmsNormGrad": _per_input(NORM_BACKWARD_FLOPS),
    "BatchNorm": _per_input(NORM_FORWARD_FLOPS),
    "BatchNormGrad": _per_input(NORM_BACKWARD_FLOPS),
    "GroupNorm": _per_input(NORM_FORWARD_FLOPS),
    "GroupNormGrad": _per_input(NORM_BACKWARD_FLOPS),
    "L2Normalize": _per_input(NORM_FORWARD_FLOPS),
    "L2NormalizeGrad": _per_input(NORM_BACKWARD_FLOPS),
    "KLDivLoss": _per_input(SOFTMAX_FLOPS),
    "KLDivLossGrad": _per_input(SOFTMAX_GRADIENT_FLOPS),
    "SmoothL1Loss": _per_input(SOFTMAX_GRADIENT_FLOPS),
    "SmoothL1LossGrad": _per_input(SOFTMAX_GRADIENT_FLOPS),
    "BCEWithLogitsLoss": _per_input(SOFTMAX_FLOPS),
    "BinaryCrossEntropyWithLogitsBackward": _per_input(SOFTMAX_GRADIENT_FLOPS),
    "NLLLoss": _per_input(1),
    "NLLLossGrad": _per_input(1),
    "SoftmaxCrossEntropyWithLogits": _per_input(SOFTMAX_FLOPS + 2),
    "SparseSoftmaxCrossEntropyWithLogits": _per_input(SOFTMAX_FLOPS + 2),
}
