"""What separate weight gradients (`W`) run again in a chunk, where the schedule splits backwards.

`W` gets nothing of what its backward has recomputed, so it runs that again, and to know when, it also makes again the
gradients that arrive at the first unit it recomputes: all gradients of later units of the chunk. With the units of a
chunk in network order, of which e is the first that `W` recomputes for,

    repeated = repeated[e] + sum over units behind e of repeated_after

and 0 if there is no such unit. Options of a run are dealt out to its units so that this is least: first the units for
which nothing runs again, then the one that saves most by being the first that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mindspore_bmpipe.problem_data import Problem, Run, schedule_of
from mindspore_bmpipe.schedule import splits_backward

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Repeats:
    """What `W` runs again of one unit of a run, by its option; milliseconds, shapes (options,)."""

    first: FloatArray
    """Where nothing before it in its chunk runs again."""
    after: FloatArray
    """Where something does."""

    @property
    def gain(self) -> FloatArray:
        """What a unit saves by being the first."""
        return np.where(self.first > 0, self.after - self.first, 0.0)

    def dealing(self) -> list[int]:
        """Options in the order in which units get them."""
        gain = self.gain
        return sorted(range(len(gain)), key=lambda option: (self.first[option] > 0, -gain[option], option))

    def of_counts(self, counts: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What runs again of units with these options, shape (n, options).

        Returns:
            Where nothing before them runs again; where something does; what the first of them saves: shapes (n,).
        """
        waits = self.first > 0
        gain = np.where(counts > 0, self.gain, 0.0).max(axis=1)
        return counts[:, waits] @ self.after[waits] - gain, counts @ self.after, gain


def repeats_of(run: Run) -> Repeats:
    """What `W` runs again of a unit of a run.

    Where an option does not say, it is all that it recomputes, and behind another unit the gradients of inputs too.
    """
    inputs = run.backward_ms - run.split_weight_ms
    first = [o.extra_backward_ms if o.repeated_ms is None else o.repeated_ms for o in run.options]
    after = [
        max(own, o.extra_backward_ms + inputs if o.repeated_after_ms is None else o.repeated_after_ms)
        for own, o in zip(first, run.options, strict=True)
    ]
    return Repeats(np.array(first), np.array(after))


def chunk_repeated(repeats: Sequence[Repeats], held: Iterable[tuple[int, Sequence[int]]]) -> float:
    """What `W` runs again of one chunk.

    Args:
        repeats: of every run.
        held: what the chunk holds in network order, as (run, units by option).
    """
    total = 0.0
    for run, counts in held:
        first, after, _ = repeats[run].of_counts(np.array([counts]))
        total += float(after[0] if total else first[0])
    return total


def decision_repeated(problem: Problem, counts: Sequence[Sequence[Sequence[int]]]) -> list[float] | None:
    """What `W` runs again of each virtual stage of a decision; `None` if the schedule never splits backwards."""
    schedule = schedule_of(problem)
    if not splits_backward(schedule):
        return None
    repeats = [repeats_of(run) for run in problem.runs]
    return [
        chunk_repeated(repeats, ((run, placed[virtual]) for run, placed in enumerate(counts) if any(placed[virtual])))
        / problem.speeds[stage]
        for virtual, stage in enumerate(schedule.stage_of_virtual)
    ]


def split_times(
    backward_ms: npt.ArrayLike, transfer_ms: npt.ArrayLike, weight_ms: npt.ArrayLike | None
) -> tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike | None, npt.ArrayLike | None]:
    """Times of plans as schedules take them after those of forwards: backward, transfers, weight gradients, repeated.

    Args:
        backward_ms: whole backward times.
        transfer_ms: transfer times.
        weight_ms: weight gradients in them and what those run again if they are apart, shape (plans, 2, K) or (2, K);
            `None` if the schedule never splits backwards.
    """
    if weight_ms is None:
        return backward_ms, transfer_ms, None, None
    weight, repeated = np.moveaxis(np.asarray(weight_ms, dtype=np.float64), -2, 0)
    return np.maximum(np.asarray(backward_ms, dtype=np.float64) - weight, 0.0), transfer_ms, weight, repeated
