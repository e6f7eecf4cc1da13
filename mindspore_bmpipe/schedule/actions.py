"""One step of a stage, and the text form of a stage's order ("F0 F1 B0", chunk 1 of micro-batch 3 is "F3/1")."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from mindspore_bmpipe.errors import InputError

FORWARD = "F"
BACKWARD = "B"
WEIGHT = "W"
WHOLE = "BW"
KINDS = (FORWARD, BACKWARD, WEIGHT, WHOLE)
"""Forward, backward (of inputs, and of weights unless the schedule has `W`), weight gradient, and both in one go."""

_ACTION_PATTERN = re.compile(r"(BW|[FBW])(\d+)(?:/(\d+))?")


class Action(NamedTuple):
    """One computation of one micro-batch through one chunk of a stage."""

    kind: str
    """One of `KINDS`."""
    chunk: int
    """Chunk of the stage, 0 to chunks - 1."""
    micro_batch: int
    """Micro-batch, 0 to micro_batches - 1."""

    def __str__(self) -> str:
        suffix = f"/{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{suffix}"


def format_order(order: Iterable[Action]) -> str:
    """Text form of one stage's order; `parse_order` reads it back."""
    return " ".join(str(action) for action in order)


def parse_order(text: str) -> tuple[Action, ...]:
    """Actions of one stage's text form.

    Raises:
        InputError: a word is not an action; the message gives its position.
    """
    order = []
    for position, word in enumerate(text.split()):
        match = _ACTION_PATTERN.fullmatch(word)
        if match is None:
            raise InputError(
                f"step {position}: {word!r} is not an action; write F, B, W or BW, the micro-batch, and /chunk if not 0"
            )
        order.append(Action(match.group(1), int(match.group(3) or 0), int(match.group(2))))
    return tuple(order)
