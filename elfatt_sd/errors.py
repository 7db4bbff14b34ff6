"""Errors that a user can cause."""

from __future__ import annotations


class ElfattError(ValueError):
    """An error that a user can cause; the message names the value and what is accepted."""


class ElfattFailure(ElfattError):
    """What was asked for is right, but it could not be done: the hub, a disk or the memory is at fault."""
