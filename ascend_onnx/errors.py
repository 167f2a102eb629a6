"""Errors that a user can do something about."""

from __future__ import annotations

__all__ = ["ExecutionError", "InputError"]


class InputError(ValueError):
    """What the user gave cannot be used.

    The message is one sentence: what was expected, what came, where, and what to do. The command line prints it and
    ends with exit code 2.
    """


class ExecutionError(InputError):
    """The runtime refused to load or to run a model; the message carries the runtime's own reason.

    `node` is the name of the node at which a run stopped, empty if that is not known.
    """

    def __init__(self, message: str, node: str = "") -> None:
        super().__init__(message)
        self.node = node
