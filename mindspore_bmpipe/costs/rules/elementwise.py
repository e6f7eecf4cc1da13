"""Operations that treat every element alone."""

from __future__ import annotations

from mindspore_bmpipe.costs.rules.base import Engine, OperationView, Rule, Work, elements, moved

TRANSCENDENTAL_FLOPS = 8
"""Vector instructions of an exponential, logarithm, sine or root: a polynomial of about this degree. An assumption;
these operations are bound by memory on every device listed, so it does not change times."""


def one_per_element(view: OperationView) -> Work:
    """One arithmetic operation for every element of the result."""
    return moved(view, Engine.VECTOR, sum((elements(kind) for kind in view.outputs), start=0))


def sum_of_all(view: OperationView) -> Work:
    """N - 1 additions for every element of the sum of n tensors."""
    return moved(view, Engine.VECTOR, elements(view.outputs[0]) * max(len(view.inputs) - 1, 1))


def transcendental(view: OperationView) -> Work:
    """A polynomial for every element of the result."""
    return moved(view, Engine.VECTOR, TRANSCENDENTAL_FLOPS * sum((elements(k) for k in view.outputs), start=0))


def dropout(view: OperationView) -> Work:
    """A random number, a comparison and a product for every element."""
    return moved(view, Engine.VECTOR, (TRANSCENDENTAL_FLOPS + 2) * elements(view.outputs[0]))


SIMPLE = (
    "Add", "AddExt", "Sub", "SubExt", "Mul", "Muls", "Div", "Divs", "RealDiv", "FloorDiv", "Mod", "Maximum", "Minimum",
    "Neg", "Abs", "Sign", "Square", "Less", "LessEqual", "Greater", "GreaterEqual", "Equal", "NotEqual", "LogicalAnd",
    "LogicalOr", "LogicalNot", "LogicalXor", "Select", "MaskedFill", "BiasAdd", "ReLU", "ReluGrad", "DropoutGrad",
    "DropoutDoMask", "AssignAdd", "AssignSub", "Assign", "AddScalar", "SubScalar", "ReLU6", "ReLU6Grad", "Lerp",
    "Trunc", "InplaceMaskedFillTensor", "DropoutGradExt", "ClampTensor", "ClampScalar", "Reciprocal", "Inv", "InvGrad",
    "Floor", "Ceil", "Round", "IsNan", "IsInf", "IsFinite", "BitwiseAnd", "BitwiseOr", "Invert",
)  # fmt: skip
HEAVY = (
    "Exp", "Log", "Sqrt", "Rsqrt", "SqrtGrad", "RsqrtGrad", "Pow", "PowTensorScalar", "PowScalarTensor", "Sin", "Cos",
    "Tanh", "TanhGrad", "Sigmoid", "SigmoidGrad", "SiLU", "SiLUGrad", "GeLU", "GeLUGrad", "GeluExt", "GeluGradExt",
    "FastGeLU", "FastGeLUGrad", "Swiglu", "SwigluGrad", "Erf", "Softplus", "SoftplusGrad", "Elu", "EluGrad",
    "Atan", "AtanGrad", "Xdivy", "LogSigmoid", "LogSigmoidGrad", "SoftplusExt", "SoftplusGradExt", "HSwishGrad",
    "Log1p", "Expm1", "HSigmoid", "HSigmoidGrad", "HSwish", "Mish",
)  # fmt: skip

RULES: dict[str, Rule] = {
    **dict.fromkeys(SIMPLE, one_per_element),
    **dict.fromkeys(HEAVY, transcendental),
    "AddN": sum_of_all,
    "Dropout": dropout,
    "DropoutExt": dropout,
    "DropoutGenMask": dropout,
}
