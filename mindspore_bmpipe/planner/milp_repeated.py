"""What separate weight gradients run again, in the integer program over counts (`split_backward` says what that is).

For virtual stage k, with a[r,o] and b[r,o] what they run again of a unit that is the first of its chunk or behind it:

    e[r,k,o]    binary    the first unit that they recompute for is of run r and has option o
    l[r,k,o]    the later ones that they recompute for
    w[r,k]      at least 0, gradients made again of units of run r for which nothing else runs again

    repeated[k] = sum over r, o with a > 0 of a e + b l  +  sum over r of w
    n = e + l,  sum over r, o of e <= 1,  l[r,k,o] <= most * sum over r' <= r and o of e[r',k,o]     for a[r,o] > 0
    w[r,k] >= sum over o with a = 0 of b n - most * (1 - sum over r' < r and o of e[r',k,o])

Less is never worse, so w is as small and b - a of the first unit as large as can be.
"""

from __future__ import annotations

from functools import partial

import mip

from mindspore_bmpipe.planner.milp_variables import CountVariables, Placed
from mindspore_bmpipe.split_backward import Repeats, repeats_of


def add_repeated(variables: CountVariables) -> list[mip.LinExpr]:
    """Add the rows; what each virtual stage runs again, in milliseconds at speed 1."""
    repeats = [repeats_of(run) for run in variables.problem.runs]
    return [_of_virtual(variables, repeats, virtual) for virtual in range(variables.problem.virtual_stages)]


def _of_virtual(variables: CountVariables, repeats: list[Repeats], virtual: int) -> mip.LinExpr:
    model = variables.model
    terms: list[mip.LinExpr] = []
    earlier: list[mip.Var] = []
    for index, run in enumerate(repeats):
        counts = variables.counts.get((index, virtual), [])
        waiting = [option for option in range(len(counts)) if run.first[option] > 0]
        behind = [float(run.after[option]) * var for option, var in enumerate(counts) if option not in waiting]
        if earlier and behind and run.after.any():
            rest = model.add_var(name=f"again_{index}_{virtual}", lb=0.0)
            most = float(run.after.max() * counts[0].ub)
            model.add_constr(rest >= mip.xsum(behind) - most + most * mip.xsum(earlier))
            terms.append(variables.derive(rest, partial(_behind, repeats, index, virtual)))
        others: list[mip.Var] = []
        for option in waiting:
            first = variables.add_binary(
                f"first_{index}_{virtual}_{option}",
                partial(_is_first, repeats, virtual, (index, option)),
            )
            later = variables.derive(
                model.add_var(name=f"later_{index}_{virtual}_{option}", lb=0.0),
                partial(_later, repeats, virtual, (index, option)),
            )
            model.add_constr(counts[option] == first + later)
            earlier.append(first)
            others.append(later)
            terms.append(float(run.first[option]) * first + float(run.after[option]) * later)
        for later in others:
            model.add_constr(later <= counts[0].ub * mip.xsum(earlier))
    if earlier:
        model.add_constr(mip.xsum(earlier) <= 1)
    return mip.xsum(terms)


def _is_first(repeats: list[Repeats], virtual: int, place: tuple[int, int], placed: Placed) -> bool:
    return _first(repeats, virtual, placed) == place


def _later(repeats: list[Repeats], virtual: int, place: tuple[int, int], placed: Placed) -> float:
    index, option = place
    return float(placed.decision.counts[index][virtual][option] - _is_first(repeats, virtual, place, placed))


def _first(repeats: list[Repeats], virtual: int, placed: Placed) -> tuple[int, int] | None:
    """Run and option of the first unit that something runs again for."""
    for index, run in enumerate(repeats):
        held = placed.decision.counts[index][virtual]
        found = [option for option in run.dealing() if held[option] and run.first[option] > 0]
        if found:
            return index, found[0]
    return None


def _behind(repeats: list[Repeats], index: int, virtual: int, placed: Placed) -> float:
    """Gradients made again of units of a run for which nothing else runs again."""
    first = _first(repeats, virtual, placed)
    if first is None or first[0] >= index:
        return 0.0
    held, run = placed.decision.counts[index][virtual], repeats[index]
    return float(sum(count * run.after[option] for option, count in enumerate(held) if not run.first[option] > 0))
