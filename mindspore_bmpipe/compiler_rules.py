"""What MindSpore's compiler refuses about the weights of a stage, as constraints of the planning problem.

`tests/test_verify_rules.py` shows each rule by a compile.
"""

from __future__ import annotations

from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem import Pin, Problem, schedule_of
from mindspore_bmpipe.schedule import splits_backward
from mindspore_bmpipe.subjects import SharedWeight, Subject


def with_compiler_rules(problem: Problem, subject: Subject) -> Problem:
    """The problem with everything added that a network's weights forbid.

    Raises:
        InputError: no plan with these stages obeys the rules.
    """
    if problem.stages == 1:
        return problem
    return _with_shared_weights(_with_split_weights(problem, subject), subject)


def _with_split_weights(problem: Problem, subject: Subject) -> Problem:
    """A split backward puts off the gradients of products with weights; a virtual stage without any is refused."""
    if not splits_backward(schedule_of(problem)):
        return problem
    runs = []
    for run, first in zip(problem.runs, problem.first_units, strict=False):
        runs.append(replace(run, trainable=run.trainable and subject.units[first].has_product))
    return replace(problem, runs=tuple(runs))


def _with_shared_weights(problem: Problem, subject: Subject) -> Problem:
    """Units that must share a stage are kept in one virtual stage, or on the first stage if a V comes back there.

    The compiler refuses a weight that cells on two stages hold as one object. A weight that one cell holds and gives to
    the others in their calls it sends to their stages, but not where chunks form a V: there it crashes.
    """
    in_a_v = schedule_of(problem).stage_of_virtual[-1] == 0
    for weight in subject.shared_weights:
        if weight.is_borrowed and not in_a_v:
            continue
        first, last = weight.units[0], weight.units[-1]
        if in_a_v and first == 0:
            pins = tuple(Pin(unit, unit, 0) for unit in weight.units)
            problem = replace(problem, pins=(*problem.pins, *(pin for pin in pins if pin not in problem.pins)))
        elif problem.units - (last - first) < problem.virtual_stages:
            raise InputError(_refusal(problem, subject, weight))
        else:
            problem = replace(problem, forbidden_cuts=problem.forbidden_cuts | frozenset(range(first, last)))
    return problem


def _refusal(problem: Problem, subject: Subject, weight: SharedWeight) -> str:
    names = ", ".join(subject.units[unit].name for unit in weight.units)
    if weight.is_borrowed:
        return (
            f"schedule: {problem.schedule} cannot share the weight {weight.name} between stages, and {names} read it; "
            "choose another schedule"
        )
    return (
        f"{subject.source}: {names} hold the weight {weight.name} as one object, which MindSpore refuses on several "
        f"stages, and {problem.stages} stages cannot keep them together; let one cell hold it and give it to the "
        "others in their calls"
    )
