"""Transfer times in the integer program over counts.

For each boundary k between virtual stages, and each stretch i of cuts first[i]..last[i] that all take time[i]:

    sum over i of z[k,i] = 1                                                             z binary
    sum of first[i] z[k,i] <= units of virtual stages up to k - 1 <= sum of last[i] z[k,i]
    C[k] = sum of time[i] z[k,i]

A boundary at which all cuts take the same needs no variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import mip
import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.planner.milp_variables import CountVariables, Placed
from mindspore_bmpipe.transfers import transfer_table

Stretch = tuple[int, int, float]
"""First and last cut, and the time of a transfer there."""


class TransferTimes:
    """Time of one transfer at every boundary, as it follows from the counts."""

    def __init__(self, variables: CountVariables) -> None:
        problem = variables.problem
        table, size = transfer_table(problem), problem.virtual_stages
        self._terms: list[list[tuple[float, mip.Var | None]]] = []
        for boundary in range(size - 1):
            # Every virtual stage holds a unit.
            stretches = _stretches(table[boundary], boundary, problem.units - size + boundary)
            if len(stretches) == 1:
                self._terms.append([(stretches[0][2], None)])
            else:
                self._terms.append(_add_stretches(variables, boundary, stretches))

    def weighted(self, counts: Sequence[int], unit_ms: float) -> mip.LinExpr:
        """So many transfers at every boundary, in units of time."""
        terms = [
            count * time / unit_ms * (1 if var is None else var)
            for count, boundary in zip(counts, self._terms, strict=True)
            if count
            for time, var in boundary
        ]
        return mip.xsum(terms) if terms else mip.LinExpr()

    def solved(self) -> npt.NDArray[np.float64]:
        """Times in what was solved last, shape (K - 1,)."""
        return np.array(
            [sum(time * (1.0 if var is None else float(var.x)) for time, var in boundary) for boundary in self._terms]
        )


def _stretches(row: npt.NDArray[np.float64], low: int, high: int) -> list[Stretch]:
    """Longest stretches of cuts low..high of equal times."""
    found: list[Stretch] = []
    for cut in range(low, high + 1):
        if found and found[-1][2] == row[cut]:
            found[-1] = (found[-1][0], cut, found[-1][2])
        else:
            found.append((cut, cut, float(row[cut])))
    return found


def _add_stretches(
    variables: CountVariables, boundary: int, stretches: Sequence[Stretch]
) -> list[tuple[float, mip.Var | None]]:
    chosen = []
    for number, (first, last, _) in enumerate(stretches):

        def holds(placed: Placed, first: int = first, last: int = last) -> bool:
            return first <= placed.until[boundary] - 1 <= last

        chosen.append(variables.add_binary(f"z_{boundary}_{number}", holds))
    cut = variables.all_until(boundary) - 1
    model = variables.model
    model.add_constr(mip.xsum(chosen) == 1, name=f"cut_{boundary}")
    model.add_constr(
        mip.xsum(first * var for (first, _, _), var in zip(stretches, chosen, strict=True)) <= cut,
        name=f"cut_{boundary}_first",
    )
    model.add_constr(
        mip.xsum(last * var for (_, last, _), var in zip(stretches, chosen, strict=True)) >= cut,
        name=f"cut_{boundary}_last",
    )
    return [(time, var) for (_, _, time), var in zip(stretches, chosen, strict=True)]
