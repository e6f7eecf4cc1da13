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
    """A split backward puts off the gradients of products with weights; a virtual stage without any is refused.

    So is every stage but the last one with such gradients if each backward shares them out.
    """
    if not splits_backward(schedule_of(problem)):
        return problem
    level = subject.config.optimizer_shard_level or 0
    shared = [unit.name for unit in subject.units if unit.has_shared_product]
    if level >= 2 and shared:
        raise InputError(
            f"schedule: {problem.schedule} does not compile at optimizer_shard_level {level} where ranks share out the "
            f"weight of a product, as those of {shared[0]} do; set optimizer_shard_level to 1, or choose another "
            "schedule"
        )
    runs = []
    for run, first in zip(problem.runs, problem.first_units, strict=False):
        runs.append(replace(run, trainable=run.trainable and subject.units[first].has_product))
    return replace(problem, runs=tuple(runs))


def _with_shared_weights(problem: Problem, subject: Subject) -> Problem:
    """Units that must share a stage are kept in one virtual stage, or on the first stage if a V comes back there.

    The compiler refuses a weight that cells on two stages hold as one object. A weight that one cell holds and gives to
    the others in their calls it sends to their stages, but not where chunks form a V: there it crashes. Nor does it
    compile a weight that is sent where its gradients are shared out, or, at level 3, one that two cells of a stage
    read.
    """
    in_a_v = schedule_of(problem).stage_of_virtual[-1] == 0
    level = subject.config.optimizer_shard_level or 0
    for weight in subject.shared_weights:
        if level == 3 and weight.is_shared_out:
            raise InputError(_level_refusal(subject, weight, level, ""))
        if weight.is_borrowed and not in_a_v and not _stays_at(level, weight):
            continue
        first, last = weight.units[0], weight.units[-1]
        if in_a_v and first == 0:
            pins = tuple(Pin(unit, unit, 0) for unit in weight.units)
            problem = replace(problem, pins=(*problem.pins, *(pin for pin in pins if pin not in problem.pins)))
        elif 1 + _trainable_outside(problem, first, last) < problem.virtual_stages:
            raise InputError(_refusal(problem, subject, weight))
        else:
            problem = replace(problem, forbidden_cuts=problem.forbidden_cuts | frozenset(range(first, last)))
    return problem


def _trainable_outside(problem: Problem, first: int, last: int) -> int:
    """Units before `first` and after `last` that may be a virtual stage by themselves."""
    trainable = [run.trainable for run in problem.runs for _ in range(run.count)]
    return sum(trainable[:first]) + sum(trainable[last + 1 :])


def _stays_at(level: int, weight: SharedWeight) -> bool:
    """Whether all units that read a weight must share a stage at a level of `parallel_optimizer`.

    At level 3 not even one whose ranks hold it whole is sent, unless it is not trained.
    """
    return (level == 2 and weight.is_shared_out) or (level == 3 and weight.is_trainable)


def _readers(subject: Subject, weight: SharedWeight) -> str:
    return ", ".join(subject.units[unit].name for unit in weight.units)


def _level_refusal(subject: Subject, weight: SharedWeight, level: int, where: str) -> str:
    return (
        f"optimizer_shard_level: MindSpore does not compile level {level} where {_readers(subject, weight)} read the "
        f"weight {weight.name}{where}; set optimizer_shard_level to 1, or give each a weight of its own"
    )


def _refusal(problem: Problem, subject: Subject, weight: SharedWeight) -> str:
    names = _readers(subject, weight)
    level = subject.config.optimizer_shard_level or 0
    if weight.is_borrowed and _stays_at(level, weight):
        where = f" on several stages, and {problem.stages} stages cannot keep them together"
        return _level_refusal(subject, weight, level, where)
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
