"""Every error a user can cause, and the exit code the command line gives for it."""

from __future__ import annotations


class BmpipeError(Exception):
    """Base of all errors meant for users.

    The message says what was wrong, where, and what to do about it.
    """

    exit_code: int = 2
    """Process exit code of the command line when this error ends it."""


class InputError(BmpipeError):
    """A file, network, configuration or argument that cannot be used as given."""


class UnknownPrimitiveError(InputError):
    """Primitives without a cost rule; all of them, never only the first."""

    def __init__(self, message: str, counts: dict[str, int]) -> None:
        super().__init__(message)
        self.counts = counts
        """How many operations of the graph use each unknown primitive."""


class InfeasibleError(BmpipeError):
    """No plan satisfies the constraints."""

    exit_code = 1


class CheckFailedError(BmpipeError):
    """A plan that breaks constraints; the message lists every violation."""

    exit_code = 1


class NoPlanFoundError(BmpipeError):
    """The time limit ended before any plan was found; a plan may still exist."""

    exit_code = 3


class TimeLimitError(BmpipeError):
    """Work that had not ended when its time limit did."""

    exit_code = 3
