"""Prefetches under way."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvtier.errors import ExpiredError
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import Reason, reason

if TYPE_CHECKING:
    from kvtier._link import Link


class Ticket:
    """A prefetch: which blocks became ready, and how it ended."""

    def __init__(self, link: Link, ticket: int, blocks: int, admitted: int, refused: int) -> None:
        self.id = ticket  # 0: there was nothing to do
        self.admitted, self.refused = admitted, refused  # blocks that will be brought up; that there is no room for
        self._link, self._blocks = link, blocks
        self._changed = threading.Condition()
        self._ready: list[int] = []
        self._seen: set[int] = set()
        self._ended: Reason | None = None

    def note(self, progress: pb.PrefetchProgress) -> None:
        with self._changed:
            count = len(progress.ready) // 4
            for block in struct.unpack_from(f"<{count}I", progress.ready):
                if block < self._blocks and block not in self._seen and self._ended is None:
                    self._seen.add(block)
                    self._ready.append(block)
            self._changed.notify_all()
        if progress.done:
            self.finish(reason(progress.reason))

    def finish(self, why: Reason) -> None:
        """Ends the ticket; the first reason stays."""
        with self._changed:
            if self._ended is None:
                self._ended = why
            self._changed.notify_all()
        self._link.tickets.pop(self.id, None)

    @property
    def ready(self) -> list[int]:
        """The indexes of the blocks that became ready so far."""
        with self._changed:
            return list(self._ready)

    @property
    def ended(self) -> Reason | None:
        """Why it ended (NONE: it did all it could); None: it runs."""
        return self._ended

    def __iter__(self) -> Iterator[int]:
        """The index of each block as it becomes ready, until the prefetch ends."""
        at = 0
        while True:
            with self._changed:
                while at >= len(self._ready) and self._ended is None:
                    self._changed.wait()  # its deadline at the node, or the attachment's end, ends it
                if at >= len(self._ready):
                    return
                block = self._ready[at]
            at += 1
            yield block

    def wait(self, timeout: float | None = None) -> Reason:
        """Waits for the end and tells why it ended early; NONE: it did not. ExpiredError after timeout seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._ended is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise ExpiredError(f"the prefetch has not ended within {timeout} s")
                self._changed.wait(left)
            return self._ended

    def cancel(self) -> None:
        """Stops the prefetch; what is ready stays. Idempotent."""
        if self._ended is not None:
            return
        request = pb.CancelRequest(attachment=self._link.attachment, ticket=self.id)
        self._link.unary(self._link.methods.cancel, request, "cancel", self._link.times.call)
        self.finish(Reason.CANCELLED)
