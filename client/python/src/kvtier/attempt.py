"""Writing: room that is reserved, filled and committed."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvtier._memory import SLOT, Bytes, Mapping, SlotTable
from kvtier.errors import ClosedError, InvalidError, KvtierError, UnavailableError
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import Namespace, Retention, WriteOutcome, part_numbers, seconds, write_outcomes

if TYPE_CHECKING:
    from kvtier._link import Link


class Sink(Protocol):
    """Where the pages of an attempt go: the node's staging, or memory of this process that is streamed."""

    def page(self, at: int) -> Bytes | None: ...
    def commit(
        self, rows: Sequence[int], durable: bool, retention: pb.Retention | None, timeout: float
    ) -> Sequence[int]: ...
    def abort(self, timeout: float) -> None: ...
    def free(self) -> None: ...


class Attempt:
    """Room for some blocks, to be filled and committed, all at once or row by row.

    It ends with the commit of its last row or with `abort`; leaving a `with` block aborts what is open. An
    array from `page` must not be touched after its row was committed or the attempt aborted: the memory is
    given to other blocks.
    """

    def __init__(self, link: Link, outcomes: Sequence[int], parts: int, in_flight_for: float = 0.0) -> None:
        self.outcomes = write_outcomes(outcomes)  # one a block of the request; GRANTED: it has a row here
        self.in_flight_for = in_flight_for  # seconds after which blocks that others write are decided
        self.parts = parts
        self.blocks = [i for i, o in enumerate(self.outcomes) if o is WriteOutcome.GRANTED]
        self._columns = {part: i for i, part in enumerate(part_numbers(parts))}
        self.link = link
        self._sink: Sink | None = None
        self._lock = threading.Lock()
        self._open = set(range(len(self.blocks)))
        self._busy = 0
        self._late = False  # a row had expired: only abort ends the attempt
        self._orphaned = False

    def begin(self, sink: Sink) -> None:
        """Puts the attempt on the books of its link."""
        self._sink = sink
        with self.link.lock:
            if self.link.failed is None:
                self.link.attempts.add(self)
                return
        sink.free()
        raise UnavailableError(f"reserve: {self.link.failed}")

    @property
    def rows(self) -> int:
        """The number of blocks granted; `blocks` has the index in the request of each."""
        return len(self.blocks)

    def page(
        self, row: int, part: int = 0, dtype: npt.DTypeLike | None = None, shape: Sequence[int] | None = None
    ) -> npt.NDArray[Any] | None:
        """The writable memory of one page, with unspecified content. None: the part has no page there."""
        column = self._columns.get(part)
        if column is None or not 0 <= row < self.rows:
            raise InvalidError(f"no row {row} part {part} in an attempt of {self.rows} rows, part set {self.parts:#x}")
        if self._sink is None or row not in self._open:
            raise ClosedError(f"row {row} was committed, or the attempt is over")
        page: npt.NDArray[Any] | None = self._sink.page(row * len(self._columns) + column)
        if page is not None and dtype is not None:
            page = page.view(dtype)
        return page.reshape(shape) if page is not None and shape is not None else page

    def commit(
        self,
        rows: Sequence[int] | None = None,
        durable: bool = False,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> list[WriteOutcome]:
        """Publishes filled rows (None: all that are open). One outcome a row, in the order asked.

        If it fails the rows stay as they were and may be committed again.
        """
        wire = retention.to_wire() if retention is not None else None
        sink, taken = self._take(rows)
        try:
            outcomes = sink.commit(taken, durable, wire, timeout or self.link.times.call)
            if len(outcomes) != len(taken):
                raise InvalidError(f"commit: {len(outcomes)} outcomes for {len(taken)} rows")
        except BaseException:
            self._settle(taken, None)
            raise
        out = write_outcomes(outcomes)
        self._settle(taken, out)
        return out

    def _take(self, rows: Sequence[int] | None) -> tuple[Sink, list[int]]:
        with self._lock:
            if self._orphaned:
                raise UnavailableError("commit: the attachment of this attempt ended: reserve again")
            if self._sink is None:
                raise ClosedError("commit: the attempt is over")
            taken = sorted(self._open) if rows is None else list(rows)
            if not taken:
                raise InvalidError("commit: no row to commit")
            if len(set(taken)) != len(taken) or not self._open.issuperset(taken):
                raise ClosedError(f"commit: rows {taken} are not all open, or one is named twice")
            self._open.difference_update(taken)
            self._busy += 1
            return self._sink, taken

    def _settle(self, taken: list[int], outcomes: list[WriteOutcome] | None) -> None:
        with self._lock:
            self._busy -= 1
            if outcomes is None:
                self._open.update(taken)
            elif WriteOutcome.EXPIRED in outcomes:
                self._late = True  # the staging is not given back before the node is told
            over = not self._open and not self._busy and not self._late
            sink = self._end() if over else None
        if sink is not None:
            sink.free()
        self._freed()

    def _end(self) -> Sink | None:
        sink, self._sink = self._sink, None
        return sink

    def _freed(self) -> None:
        with self.link.lock:
            if self._sink is None:
                self.link.attempts.discard(self)
            self.link.freed.notify_all()

    def abort(self) -> None:
        """Ends the attempt without publishing what is not committed. Idempotent; it never fails."""
        with self._lock:
            sink = self._end()
            self._open.clear()
        if sink is None:
            return
        if not self._orphaned:
            with contextlib.suppress(KvtierError):  # its deadline, or the attachment's end, ends it otherwise
                sink.abort(self.link.times.call)
        sink.free()
        self._freed()

    def orphan(self) -> None:
        """The attachment ended: what is being filled stays mapped until abort, but is only thrown away."""
        with self._lock:
            self._orphaned = True

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"Attempt({self.rows} rows, {len(self._open)} open)"


class Staging:
    """Pages in the node's staging memory."""

    def __init__(self, link: Link, token: bytes, slots: SlotTable, maps: dict[int, Mapping]) -> None:
        self.link, self._token, self._maps = link, token, maps
        self._extents, self._offsets = slots["extent"].tolist(), slots["offset"].tolist()
        self._lengths = slots["bytes"].tolist()

    def page(self, at: int) -> Bytes | None:
        length = self._lengths[at]
        if not length:
            return None
        start = self._offsets[at]
        return self._maps[self._extents[at]].bytes[start : start + length]

    def commit(
        self, rows: Sequence[int], durable: bool, retention: pb.Retention | None, timeout: float
    ) -> Sequence[int]:
        request = pb.CommitRequest(
            attachment=self.link.attachment,
            attempt=self._token,
            durable=durable,
            retention=retention,
            rows=struct.pack(f"<{len(rows)}I", *rows),
        )
        return self.link.unary(self.link.methods.commit, request, "commit", timeout).outcomes

    def abort(self, timeout: float) -> None:
        request = pb.AbortRequest(attachment=self.link.attachment, attempt=self._token)
        self.link.unary(self.link.methods.abort, request, "abort", timeout)

    def free(self) -> None:
        self._maps = {}


def accept(link: Link, ns: Namespace, names: int, answer: pb.ReserveResponse) -> Attempt:
    """Checks what the node granted and makes an attempt of it."""
    attempt = Attempt(link, answer.outcomes, answer.parts, seconds(answer.in_flight_for))
    columns = part_numbers(answer.parts)
    want = attempt.rows * len(columns) * SLOT.itemsize
    granted = attempt.rows > 0
    if (
        len(answer.outcomes) != names
        or len(answer.slots) != want
        or (granted and (not want or len(answer.attempt) != 16))
    ):
        raise InvalidError(
            f"reserve: {len(answer.outcomes)} outcomes and {len(answer.slots)} bytes of slots for {names} blocks"
        )
    if not granted:
        return attempt
    slots = np.frombuffer(answer.slots, SLOT)
    check_lengths(slots, columns, ns)
    assert link.extents is not None
    staging = Staging(link, answer.attempt, slots, link.extents.resolve(slots, staging=True))
    attempt.begin(staging)
    return attempt


def check_lengths(slots: SlotTable, columns: list[int], ns: Namespace) -> None:
    """Compares the length of each page with the layout."""
    parts = ns.layout.parts
    if columns and columns[-1] >= len(parts):
        raise InvalidError(f"part {columns[-1]} of a layout of {len(parts)} parts")
    want = np.array([parts[part].page_bytes for part in columns], np.uint64)
    have = slots["bytes"].reshape(-1, len(columns))
    if ((have != 0) & (have != want)).any():
        raise InvalidError(f"pages of {np.unique(have).tolist()} bytes, the layout says {want.tolist()}")
