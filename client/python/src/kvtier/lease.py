"""Leases: the right to read pages, which lasts as long as anything made from it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvtier import _fork
from kvtier._memory import Bytes, Mapping, SlotTable
from kvtier._mux import RELEASE
from kvtier.errors import (
    ClosedError,
    ExpiredError,
    InvalidError,
    KvtierError,
    LostError,
    UnavailableError,
    ViewsInUseError,
    again,
)
from kvtier.words import Shortfall, Tier, part_numbers

if TYPE_CHECKING:
    import torch

    from kvtier._link import Link


class _Pin:
    """What every array made from a lease stands on: while one exists, so does the lease."""

    __slots__ = ("__array_interface__", "_hold", "_mapping")

    def __init__(self, hold: Hold, mapping: Mapping, writable: bool) -> None:
        self._hold, self._mapping = hold, mapping
        self.__array_interface__ = {
            "shape": (mapping.size,),
            "typestr": "|u1",
            "data": (mapping.address, not writable),
            "version": 3,
        }

    def __del__(self) -> None:
        self._hold.view_gone()


class Hold:
    """What a lease and the arrays made from it share. It ends when neither is left, or when it is ended.

    Methods that finalizers call (view_gone, finish) take no lock: a finalizer may run inside any of ours.
    """

    def __init__(self, link: Link, lease: int, maps: dict[int, Mapping], ttl: float) -> None:
        self.link, self.id, self.ttl = link, lease, ttl
        self.renew_at = self.held_until = 0.0
        self.why: KvtierError | None = None  # no new view is given
        self.lost = False
        self._maps = maps
        self._lock = threading.Lock()
        self._views: dict[tuple[int, bool], weakref.ref[Bytes]] = {}
        self._note = RELEASE  # what the node is told at the end; empty: nothing
        self._once = [True]
        self._forks = _fork.count()

    def view(self, extent: int, writable: bool) -> Bytes:
        """An array over the extent, of which pages are slices. It pins the lease."""
        key = (extent, writable)
        with self._lock:
            if self.why is not None:
                raise again(self.why)
            made = self._views.get(key)
            array = made() if made is not None else None
            if array is None:
                array = np.asarray(_Pin(self, self._maps[extent], writable))
                self._views[key] = weakref.ref(array)
            return array

    @property
    def viewed(self) -> bool:
        return any(ref() is not None for ref in list(self._views.values()))

    def view_gone(self) -> None:
        if self.why is not None and not self.viewed:
            self.finish()

    def end(self, why: KvtierError, note: str) -> None:
        """No new views from now on; the node is told with the last one that exists."""
        with self._lock:
            if self.why is None:
                self.why, self._note = why, note
        if not self.viewed:
            self.finish()

    def finish(self) -> None:
        """Gives everything back, once."""
        try:
            self._once.pop()
        except IndexError:
            return
        self._maps = {}
        if self._forks != _fork.count():
            return  # the parent's lease: its memory goes with this process
        self.link.finished(self.id, self._note)

    def __del__(self) -> None:
        self.finish()

    def stale(self, slots: SlotTable) -> bool:
        """A generation differs from that of its slot reference."""
        for extent, mapping in list(self._maps.items()):
            mine = slots[(slots["extent"] == extent) & (slots["bytes"] != 0)]
            if (mapping.generations[mine["offset"] >> np.uint64(12)] != mine["generation"]).any():
                self.lost = True
        return self.lost


class Lease:
    """A set of pages that may be read in place.

    The lease ends with `release`, or by itself when this object and every array made from it are gone. It is
    renewed while it is held. It can end earlier: the node asks for it back, or the attachment ends; then
    `page` raises, and arrays that exist stay readable.

    What was read can be used once `check` (or `release`, or leaving the `with` block) has not raised.
    """

    def __init__(
        self,
        *,
        parts: int,
        usable_blocks: int = 0,
        usable_tokens: int = 0,
        rows: int = 0,
        tiers: tuple[Tier, ...] = (),
        shortfalls: Sequence[Shortfall] = (),
        adopt_token: bytes = b"",
        hold: Hold | None = None,
        slots: SlotTable | None = None,
        own: list[Bytes | None] | None = None,
    ) -> None:
        self.usable_blocks, self.usable_tokens, self.rows = usable_blocks, usable_tokens, rows
        self.parts, self.tiers, self.adopt_token = parts, tiers, adopt_token
        self.shortfalls = list(shortfalls)
        self._columns = {part: i for i, part in enumerate(part_numbers(parts))}
        self._hold, self._slots, self._own = hold, slots, own
        self._released = False
        if slots is not None:
            self._extents = slots["extent"].tolist()
            self._offsets = slots["offset"].tolist()
            self._lengths = slots["bytes"].tolist()

    @property
    def id(self) -> int:
        """The lease's number at the node. 0: nothing is held there."""
        return self._hold.id if self._hold is not None else 0

    def __len__(self) -> int:
        return self.rows

    def _at(self, row: int, part: int) -> int:
        column = self._columns.get(part)
        if column is None or not 0 <= row < self.rows:
            raise InvalidError(f"no row {row} part {part} in a lease of {self.rows} rows, part set {self.parts:#x}")
        return row * len(self._columns) + column

    def _bytes(self, row: int, part: int, writable: bool) -> Bytes | None:
        at = self._at(row, part)
        if self._own is not None:
            if self._released:
                raise ClosedError("the lease was released")
            return self._own[at]
        if self._hold is None or not self._lengths[at]:
            return None
        start = self._offsets[at]
        return self._hold.view(self._extents[at], writable)[start : start + self._lengths[at]]

    def page(
        self, row: int, part: int = 0, dtype: npt.DTypeLike | None = None, shape: Sequence[int] | None = None
    ) -> npt.NDArray[Any] | None:
        """The page of one part in one row, in place and read-only. None: there is no page there."""
        page: npt.NDArray[Any] | None = self._bytes(row, part, writable=False)
        if page is not None and dtype is not None:
            page = page.view(dtype)
        return page.reshape(shape) if page is not None and shape is not None else page

    def pages(self, part: int = 0) -> list[Bytes | None]:
        """The pages of one part, a row each."""
        return [self._bytes(row, part, writable=False) for row in range(self.rows)]

    def tensor(
        self, row: int, part: int = 0, dtype: torch.dtype | None = None, shape: Sequence[int] | None = None
    ) -> torch.Tensor | None:
        """The page as a torch tensor, in place. A write faults: torch knows no read-only tensor."""
        import torch

        page = self._bytes(row, part, writable=True)
        if page is None:
            return None
        tensor = torch.from_numpy(page)
        if dtype is not None:
            tensor = tensor.view(dtype)
        return tensor.reshape(tuple(shape)) if shape is not None else tensor

    @property
    def ended(self) -> KvtierError | None:
        """Why the lease gives no views any more; None: it is held."""
        return self._hold.why if self._hold is not None else None

    def check(self) -> None:
        """Raises LostError if a page of this lease was reused. Call it after the last read."""
        if self._hold is not None and self._slots is not None and self._hold.stale(self._slots):
            raise LostError(f"lease {self.id}: a slot was reused while it was read")

    def release(self, wait: bool = True) -> None:
        """Ends the lease. LostError: what was read from it is not to be used. Idempotent.

        ViewsInUseError, and nothing is released, while arrays made from it exist. With wait the node is asked
        for its verdict as well, if it can be; else it is told one-way.
        """
        hold = self._hold
        if hold is None or self._released:
            self._released, self._own = True, None if hold is None else self._own
            return
        if hold.viewed:
            raise ViewsInUseError(f"lease {self.id}: arrays made from it still exist")
        self._released = True
        stale = self._slots is not None and hold.stale(self._slots)
        if wait and hold.why is None:
            hold.end(ClosedError("the lease was released"), "")
            stale = hold.link.ask_release(hold.id) or stale
        else:
            hold.end(ClosedError("the lease was released"), RELEASE)
        if stale:
            hold.lost = True
            raise LostError(f"lease {self.id}: a slot was reused while it was read")

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release(wait=False)

    def __repr__(self) -> str:
        return f"Lease({self.id}, {self.usable_blocks} blocks, {self.rows} rows)"


def revoked_error(lease: int) -> ExpiredError:
    return ExpiredError(f"lease {lease} was revoked by the node: fetch again")


def dead_error(lease: int) -> UnavailableError:
    return UnavailableError(f"lease {lease}: its attachment ended: fetch again")
