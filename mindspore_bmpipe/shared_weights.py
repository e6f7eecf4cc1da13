"""What weights read by several units forbid: MindSpore sends a weight to another stage only in some cases."""

from __future__ import annotations

from dataclasses import replace

from mindspore_bmpipe.errors import InputError
from mindspore_bmpipe.problem import Pin, Problem, schedule_of
from mindspore_bmpipe.subjects import SharedWeight, Subject


def with_shared_weights(problem: Problem, subject: Subject) -> Problem:
    """The problem with the units that must share a stage kept together.

    The compiler refuses a weight that cells on two stages hold as one object. A weight that one cell holds and gives to
    the others in their calls it sends to their stages, but not where chunks form a V: there it crashes. Units that must
    share a stage are kept in one virtual stage, or on the first stage if a V brings the pipeline back there.

    Raises:
        InputError: no plan with these stages keeps them together.
    """
    in_a_v = is_v_shaped(problem)
    for weight in subject.shared_weights:
        if problem.stages == 1 or (weight.is_borrowed and not in_a_v):
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


def is_v_shaped(problem: Problem) -> bool:
    """Whether the last virtual stage is on the first stage."""
    return problem.stages > 1 and schedule_of(problem).stage_of_virtual[-1] == 0


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
