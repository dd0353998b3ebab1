"""Pages for a client that is not co-located: their bytes are streamed, and verified here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np

from kvtier._memory import Bytes
from kvtier.attempt import Attempt
from kvtier.checksum import page_checksum
from kvtier.errors import UNANSWERED, ExpiredError, InvalidError, KvtierError, from_rpc
from kvtier.lease import Lease
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import (
    MAX_CHUNK_BYTES,
    MAX_PAGE_STREAM,
    Layout,
    Mode,
    Namespace,
    Reason,
    Shortfall,
    Tier,
    WriteOutcome,
    number,
    pack,
    part_numbers,
    shortfalls,
    tiers,
)

if TYPE_CHECKING:
    from kvtier._link import Link
    from kvtier.client import Client


class Budget:
    """Memory of this process that pages may take."""

    def __init__(self, most: int) -> None:
        self.most, self.used = most, 0
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Takes the leading sizes that fit: how many, and their bytes, to be given back."""
        with self._lock:
            count = total = 0
            for size in sizes:
                if self.used + total + size > self.most:
                    break
                count, total = count + 1, total + size
            self.used += total
            return count, total

    def give(self, size: int) -> None:
        with self._lock:
            self.used -= size


def block_bytes(layout: Layout, position: int, parts: int) -> int:
    """The bytes of the pages that lie at one position."""
    return sum(layout.parts[part].page_bytes for part in part_numbers(layout.pages_at(position, parts)))


class _Progress:
    """Cancels a stream that makes no progress for limit seconds: gRPC bounds only the whole."""

    def __init__(self, limit: float, cancel: Callable[[], Any]) -> None:
        self._limit, self._cancel = limit, cancel
        self._moved = threading.Event()
        self._done = threading.Event()
        self.stalled = False
        self._thread = threading.Thread(target=self._watch, name="kvtier-progress", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.is_set():
            if not self._moved.wait(self._limit):
                self.stalled = not self._done.is_set()
                self._cancel()
                return
            self._moved.clear()
            self._done.wait(self._limit / 4)

    def moved(self) -> None:
        self._moved.set()

    def close(self) -> None:
        self._done.set()
        self._moved.set()
        self._thread.join()


def _failed(link: Link, e: grpc.RpcError, progress: _Progress, verb: str) -> KvtierError:
    if progress.stalled:
        return ExpiredError(f"{verb}: no progress for {link.times.call} s")
    if e.code() not in UNANSWERED:
        link.heard += 1
    return from_rpc(e, verb)


def fetch(
    client: Client,
    link: Link,
    ns: Namespace,
    names: Sequence[bytes],
    first: int,
    parts: int,
    mode: Mode,
    timeout: float | None,
) -> Lease:
    """Client.fetch where the pages are received into memory of this process."""
    parts = parts or ns.layout.all_parts
    if parts & ~ns.layout.all_parts:
        raise InvalidError(f"fetch: part set {parts:#x} of a layout of {len(ns.layout.parts)} parts")
    pack(names)
    count, taken = client.private.take([block_bytes(ns.layout, first + i, parts) for i in range(len(names))])
    incoming = _Incoming(ns.layout, first, count, parts, mode)
    if count < len(names):
        incoming.shortfalls.append(Shortfall(count, len(names) - count, Reason.NO_SPACE))
    try:
        if count:
            _receive(link, incoming, ns, names[:count], timeout)
        return incoming.lease(_Private(client.private, taken))
    except BaseException:
        client.private.give(taken)
        raise


class _Private:
    """What a streamed lease took of the budget, given back when its last page is gone."""

    def __init__(self, budget: Budget, taken: int) -> None:
        self._budget, self._taken = budget, taken

    def __del__(self) -> None:
        self._budget.give(self._taken)


def _receive(link: Link, incoming: _Incoming, ns: Namespace, names: Sequence[bytes], timeout: float | None) -> None:
    request = pb.ReadPagesRequest(
        namespace_id=ns.id,
        block_names=pack(names),
        parts=incoming.parts,
        mode=number(incoming.mode),
        first_block=incoming.first,
    )
    link.called()
    stream = link.methods.read_pages(request, timeout=timeout or MAX_PAGE_STREAM, metadata=link.metadata)
    progress = _Progress(link.times.call, stream.cancel)
    try:
        for message in stream:
            link.heard += 1
            progress.moved()
            incoming.take(message)
        incoming.end()
    except grpc.RpcError as e:
        raise _failed(link, e, progress, "fetch") from None
    finally:
        progress.close()
        stream.cancel()


class _Incoming:
    """The pages of one fetch. A piece that does not fit what was asked ends it; a page with a wrong checksum
    is left out."""

    def __init__(self, layout: Layout, first: int, names: int, parts: int, mode: Mode) -> None:
        self.layout, self.first, self.names, self.parts, self.mode = layout, first, names, parts, mode
        self.columns = part_numbers(parts)
        self.shortfalls: list[Shortfall] = []
        self.usable, self.rows, self.tiers = 0, 0, b""
        self.own: list[Bytes | None] | None = None
        self._page: Bytes | None = None
        self._at, self._done, self._sum = (-1, -1), 0, 0

    def take(self, message: pb.ReadPagesResponse) -> None:
        if message.HasField("header"):
            self._header(message.header)
        else:
            self._piece(message.chunk)

    def _header(self, h: pb.ReadPagesHeader) -> None:
        self.usable, self.tiers = h.usable_blocks, h.tiers
        self.rows = self.names if self.mode is Mode.SET else self.usable
        if (
            self.own is not None
            or self.usable > self.names
            or len(h.tiers) not in (0, self.rows)
            or h.parts != self.parts
        ):
            raise InvalidError(
                f"fetch: header of {h.usable_blocks} blocks, {len(h.tiers)} tiers, part set {h.parts:#x}"
            )
        self.shortfalls = shortfalls(h.shortfalls) + self.shortfalls
        self.own = [None] * (self.rows * len(self.columns))

    def _index(self, block: int, part: int) -> int:
        return block * len(self.columns) + self.columns.index(part)

    def _piece(self, c: pb.PageChunk) -> None:
        if self.own is None or c.block >= self.rows or c.part not in self.columns:
            raise InvalidError(f"fetch: piece of block {c.block} part {c.part}, which was not asked for")
        if c.offset == 0:
            want = self.layout.parts[c.part].page_bytes
            has_page = self.layout.pages_at(self.first + c.block, self.parts) >> c.part & 1
            if c.page_bytes != want or not has_page or self.own[self._index(c.block, c.part)] is not None:
                raise InvalidError(
                    f"fetch: page of {c.page_bytes} bytes for block {c.block} part {c.part}, unasked or twice"
                )
            self._page, self._at, self._done, self._sum = np.empty(want, np.uint8), (c.block, c.part), 0, c.checksum
        page, n = self._page, len(c.data)
        if (
            page is None
            or self._at != (c.block, c.part)
            or c.offset != self._done
            or not 0 < n <= page.size - self._done
        ):
            raise InvalidError(f"fetch: piece of {n} bytes at {c.offset} of block {c.block} part {c.part} out of order")
        page[self._done : self._done + n] = np.frombuffer(c.data, np.uint8)
        self._done += n
        if self._done == page.size:
            self._finish(page)

    def _finish(self, page: Bytes) -> None:
        assert self.own is not None
        block, part = self._at
        if page_checksum(page) == self._sum:
            page.flags.writeable = False
            self.own[self._index(block, part)] = page
        else:
            self.shortfalls.append(Shortfall(block, 1, Reason.CORRUPT))
        self._page = None

    def end(self) -> None:
        """Cuts the lease to what arrived whole."""
        if self._page is not None:
            raise InvalidError(f"fetch: the stream ended inside the page of block {self._at[0]}")
        whole = [self._whole(row) for row in range(self.rows)]
        if self.mode is Mode.SET:
            self.usable = sum(whole)
        elif not all(whole):
            # A missing page of a part of which only the last blocks are needed may be none that is needed;
            # cutting there loses hits, never correctness.
            self.usable = self.rows = whole.index(False)
            self.tiers = self.tiers[: self.rows]

    def _whole(self, row: int) -> bool:
        assert self.own is not None
        if self.mode is Mode.PREFIX:
            parts = _needed(self.layout, self.usable, row, self.first, self.parts)
        else:
            parts = self.layout.pages_at(self.first + row, self.parts)
        return all(self.own[self._index(row, part)] is not None for part in part_numbers(parts))

    def lease(self, private: _Private) -> Lease:
        own = self.own or []
        keep: list[Bytes | None] = [None if page is None else _kept(page, private) for page in own]
        return Lease(
            parts=self.parts,
            usable_blocks=self.usable,
            usable_tokens=self.usable * self.layout.block_tokens if self.mode is Mode.PREFIX else 0,
            rows=self.rows,
            tiers=tuple(tiers(self.tiers)) or (Tier.NONE,) * self.rows,
            shortfalls=self.shortfalls,
            own=keep,
        )


def _needed(layout: Layout, usable: int, row: int, first: int, parts: int) -> int:
    """The parts whose page at a row is needed to reuse a prefix that ends behind row usable-1."""
    out = layout.pages_at(first + row, parts)
    for part in part_numbers(out):
        last = layout.parts[part].last_blocks
        if last and usable - row > last:
            out &= ~(1 << part)
    return out


class _Kept:
    __slots__ = ("__array_interface__", "_page", "_private")

    def __init__(self, page: Bytes, private: _Private) -> None:
        self._page, self._private = page, private
        self.__array_interface__ = page.__array_interface__


def _kept(page: Bytes, private: _Private) -> Bytes:
    """The page as an array that also keeps its share of the budget."""
    return np.asarray(_Kept(page, private))


class _OwnPages:
    """Memory of this process for the pages of an attempt, streamed at commit."""

    def __init__(
        self, link: Link, ns: Namespace, names: Sequence[bytes], first: int, parts: int, budget: Budget
    ) -> None:
        self._link, self._ns, self._names, self._first, self._parts = link, ns, names, first, parts
        self._budget, self._bytes = budget, 0
        self._columns = part_numbers(parts)
        self._pages: list[Bytes | None] = []
        self.blocks: list[int] = []

    def grant(self, block: int) -> bool:
        position = self._first + block
        count, taken = self._budget.take([block_bytes(self._ns.layout, position, self._parts)])
        if not count:
            return False
        self._bytes += taken
        at = self._ns.layout.pages_at(position, self._parts)
        for part in self._columns:
            size = self._ns.layout.parts[part].page_bytes
            self._pages.append(np.empty(size, np.uint8) if at >> part & 1 else None)
        self.blocks.append(block)
        return True

    def page(self, at: int) -> Bytes | None:
        return self._pages[at]

    def commit(
        self, rows: Sequence[int], durable: bool, retention: pb.Retention | None, timeout: float
    ) -> Sequence[int]:
        """A call for each run of consecutive blocks."""
        outcomes: list[int] = []
        start = 0
        for end in range(1, len(rows) + 1):
            if end < len(rows) and self.blocks[rows[end]] == self.blocks[rows[end - 1]] + 1:
                continue
            outcomes.extend(self._run(rows[start:end], durable, retention))
            start = end
        return outcomes

    def _run(self, rows: Sequence[int], durable: bool, retention: pb.Retention | None) -> bytes:
        first = self.blocks[rows[0]]
        header = pb.WritePagesHeader(
            namespace_id=self._ns.id,
            block_names=pack(self._names[first : first + len(rows)]),
            first_block=self._first + first,
            parts=self._parts,
            durable=durable,
            retention=retention,
        )
        link = self._link
        link.called()
        sent = threading.Event()
        progress: list[_Progress] = []

        def messages() -> Iterator[pb.WritePagesRequest]:
            yield pb.WritePagesRequest(header=header)
            for chunk in self._chunks(rows):
                yield pb.WritePagesRequest(chunk=chunk)
                sent.set()
                for p in progress:
                    p.moved()

        call = link.methods.write_pages.future(messages(), timeout=MAX_PAGE_STREAM, metadata=link.metadata)
        progress.append(_Progress(link.times.call, call.cancel))
        try:
            outcomes: bytes = call.result().outcomes
        except grpc.FutureCancelledError:
            raise ExpiredError(f"commit: no progress for {link.times.call} s") from None
        except grpc.RpcError as e:
            raise _failed(link, e, progress[0], "commit") from None
        finally:
            progress[0].close()
        link.heard += 1
        return outcomes

    def _chunks(self, rows: Sequence[int]) -> Iterator[pb.PageChunk]:
        for block, row in enumerate(rows):
            for column, part in enumerate(self._columns):
                page = self._pages[row * len(self._columns) + column]
                if page is None:
                    continue
                total = page_checksum(page)
                for offset in range(0, page.size, MAX_CHUNK_BYTES):
                    data = page[offset : offset + MAX_CHUNK_BYTES].tobytes()
                    yield pb.PageChunk(
                        block=block, part=part, offset=offset, data=data, page_bytes=page.size, checksum=total
                    )

    def abort(self, timeout: float) -> None:
        """The node knows nothing of it yet."""

    def free(self) -> None:
        self._budget.give(self._bytes)
        self._bytes, self._pages = 0, []


def reserve(client: Client, link: Link, ns: Namespace, names: Sequence[bytes], first: int, parts: int) -> Attempt:
    """Client.reserve where the room is in this process. What the node has already is not asked for again."""
    layout = ns.layout
    parts = parts or layout.parts_of_ranks(client.ranks)
    if not parts or parts & ~layout.all_parts:
        raise InvalidError(f"reserve: part set {parts:#x} of a layout of {len(layout.parts)} parts")
    pack(names)
    outcomes = [WriteOutcome.NOT_REACHED] * len(names)
    mine = [layout.parts[part] for part in part_numbers(parts)]
    if all(p.blocks_per_page == 1 and not p.last_blocks for p in mine):
        # Only where each block has a page of each part does lookup tell for certain; else the write does.
        for i, tier in enumerate(client.lookup(ns, names, parts).tiers):
            if tier is not Tier.NONE:
                outcomes[i] = WriteOutcome.EXISTS
    own = _OwnPages(link, ns, names, first, parts, client.staged)
    seen: set[bytes] = set()
    for i, name in enumerate(names):
        if name in seen:
            outcomes[i] = WriteOutcome.REPEATED
        seen.add(name)
        if outcomes[i] is not WriteOutcome.NOT_REACHED:
            continue
        if not own.grant(i):
            outcomes[i] = WriteOutcome.STAGING_FULL
            break
        outcomes[i] = WriteOutcome.GRANTED
    attempt = Attempt(link, outcomes, parts)
    if attempt.rows:
        attempt.begin(own)
    return attempt
