"""Knows in which process this is: clients do not outlive a fork."""

from __future__ import annotations

import os
from typing import Any

_forks = 0
_kept: list[Any] = []
_live: list[Any] = []


def count() -> int:
    """The number of forks between the process that loaded this package and this one."""
    return _forks


def keep_after_fork(thing: Any) -> None:
    """A child never destroys thing: gRPC's objects must not be taken down where their threads are not."""
    _live.append(thing)


def drop(thing: Any) -> None:
    """Thing is destroyed in an orderly way, in the process that made it."""
    for i, have in enumerate(_live):
        if have is thing:
            del _live[i]
            return


def _in_child() -> None:
    global _forks
    _forks += 1
    _kept.extend(_live)
    _live.clear()


os.register_at_fork(after_in_child=_in_child)
