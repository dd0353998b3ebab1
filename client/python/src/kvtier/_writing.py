"""Writing many blocks in as many rounds as the staging needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvtier._memory import Bytes
from kvtier.attempt import Attempt
from kvtier.errors import ExpiredError, NoSpaceError
from kvtier.words import Namespace, Retention, WriteOutcome, part_numbers

if TYPE_CHECKING:
    from kvtier.client import Client

# Blocks of one round: asking for many more than the staging takes would send their names over and over.
_ASK_FIRST, _ASK_LEAST = 1024, 32

# Staging is this process's own: the wait for it is for other writers here, which say when they are done.
_STAGING_POLL = 0.02

_FULL = (WriteOutcome.NO_SPACE, WriteOutcome.OVER_QUOTA)
_UNDECIDED = (WriteOutcome.STAGING_FULL, WriteOutcome.NOT_REACHED, *_FULL)


class Writer:
    def __init__(
        self,
        client: Client,
        ns: Namespace,
        names: Sequence[bytes],
        fill: Callable[[int, int, Bytes], None],
        first: int,
        parts: int,
        durable: bool,
        retention: Retention | None,
        timeout: float | None,
    ) -> None:
        self._client, self._ns, self._names, self._fill = client, ns, names, fill
        self._first, self._parts, self._durable, self._retention = first, parts, durable, retention
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._outcomes = [WriteOutcome.NOT_REACHED] * len(names)
        self._next = 0  # first block that is not decided
        self._ask = _ASK_FIRST

    def run(self) -> list[WriteOutcome]:
        while self._next < len(self._names):
            if self._deadline is not None and time.monotonic() > self._deadline:
                raise ExpiredError(f"write: {self._next} of {len(self._names)} blocks were written in time")
            self._round()
            if self._next < len(self._names) and self._outcomes[self._next] in _FULL:
                break
        return self._outcomes

    def _round(self) -> None:
        """Writes the leading blocks that have staging, or waits for some."""
        names = self._names[self._next : self._next + self._ask]
        with self._client.reserve(self._ns, names, first=self._first + self._next, parts=self._parts) as attempt:
            decided = len(attempt.outcomes)
            for i, outcome in enumerate(attempt.outcomes):
                if outcome in _UNDECIDED:
                    decided = i
                    break
            for i in range(min(decided + 1, len(attempt.outcomes))):
                if attempt.outcomes[i] is not WriteOutcome.GRANTED and (i < decided or attempt.outcomes[i] in _FULL):
                    self._outcomes[self._next + i] = attempt.outcomes[i]
            if attempt.rows:
                self._write(attempt)
            elif not decided:
                if attempt.outcomes[0] not in _FULL:
                    self._wait(attempt)
                return
        self._next += decided
        self._ask = max(2 * decided, _ASK_LEAST)

    def _write(self, attempt: Attempt) -> None:
        parts = part_numbers(attempt.parts)
        for row, block in enumerate(attempt.blocks):
            for part in parts:
                page = attempt.page(row, part)
                if page is not None:
                    self._fill(self._next + block, part, page)
        outcomes = attempt.commit(durable=self._durable, retention=self._retention)
        for block, outcome in zip(attempt.blocks, outcomes, strict=True):
            self._outcomes[self._next + block] = outcome

    def _wait(self, attempt: Attempt) -> None:
        """Waits until another attempt of this client gives staging back."""
        link = attempt.link
        with link.lock:
            alone = not link.attempts and not link.reserving
            link.freed.wait(_STAGING_POLL)
            if alone and not link.attempts and not link.reserving:
                raise NoSpaceError("the staging has no room for one block: raise staging_bytes")
