"""Many calls at once over the one attachment stream."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator

from kvtier.errors import ExpiredError, KvtierError, again, from_detail
from kvtier.v1 import pages_pb2 as pb

# The leases of one one-way message.
_FLUSH_MOST = 4096

# One-way notes: what is told, and about which lease. The queue takes them from finalizers, which may run
# anywhere: SimpleQueue.put is reentrant and takes no lock of ours.
RELEASE = "release"
REVOKED = "revoked"
Note = tuple[str, int]


class _Waiter:
    __slots__ = ("error", "lock", "message")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.message: pb.AttachResponse | None = None
        self.error: KvtierError | None = None


class Mux:
    """Requests go out through `requests`, which gRPC drives; `deliver` is called by the stream's one reader.

    The queue is bounded by what fills it: a request has a caller that waits for its answer, a note has a
    lease that was held.
    """

    def __init__(self, event: Callable[[pb.AttachResponse], None]) -> None:
        self._event = event
        self._queue: queue.SimpleQueue[pb.AttachRequest | Note | None] = queue.SimpleQueue()
        self._pending: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._closed: KvtierError | None = None

    @property
    def waiting(self) -> int:
        return len(self._pending)

    def ask(self, request: pb.AttachRequest, timeout: float) -> pb.AttachResponse:
        """Sends request, which it numbers, and waits for the answer. An error that the node reports is raised."""
        waiter, number = _Waiter(), next(self._ids)
        request.request_id = number
        self._pending[number] = waiter
        if self._closed is not None:  # looked at after the waiter was added: fail_all misses none
            self._pending.pop(number, None)
            raise again(self._closed)
        self._queue.put(request)
        if not waiter.lock.acquire(timeout=timeout):
            if self._pending.pop(number, None) is not None:
                raise ExpiredError(f"no answer within {timeout:.3g} s")
            waiter.lock.acquire()  # whoever took it out of pending is about to answer
        if waiter.error is not None:
            raise again(waiter.error)
        assert waiter.message is not None
        if waiter.message.HasField("error"):
            raise from_detail(waiter.message.error)
        return waiter.message

    def post(self, note: Note) -> None:
        """Tells the node one-way. It neither blocks nor fails; after the end it does nothing."""
        if self._closed is None:
            self._queue.put(note)

    def send(self, request: pb.AttachRequest, answered: bool) -> None:
        """Sends without waiting: request goes one-way, or its answer only counts as a sign of life."""
        if answered:
            request.request_id = next(self._ids)
        if self._closed is None:
            self._queue.put(request)

    def deliver(self, message: pb.AttachResponse) -> None:
        waiter = self._pending.pop(message.request_id, None) if message.request_id else None
        if waiter is None:
            self._event(message)
            return
        waiter.message = message
        waiter.lock.release()

    def fail_all(self, error: KvtierError, closing: bool) -> None:
        """Fails what waits now; with closing, nothing is accepted from then on."""
        if closing and self._closed is None:
            self._closed = error
            self._queue.put(None)
        for number in list(self._pending):
            waiter = self._pending.pop(number, None)
            if waiter is not None:
                waiter.error = error
                waiter.lock.release()

    def requests(self) -> Iterator[pb.AttachRequest]:
        """What goes out, notes in batches. Ends with fail_all(closing)."""
        while True:
            item = self._queue.get()
            notes: dict[str, list[int]] = {RELEASE: [], REVOKED: []}
            while isinstance(item, tuple):
                kind, lease = item
                notes[kind].append(lease)
                if len(notes[kind]) >= _FLUSH_MOST or self._queue.empty():
                    break
                item = self._queue.get()  # the only consumer: what is not empty does not block
            if notes[RELEASE]:
                yield pb.AttachRequest(release=pb.ReleaseRequest(lease_ids=notes[RELEASE]))
            if notes[REVOKED]:
                yield pb.AttachRequest(revoked=pb.Revoked(lease_ids=notes[REVOKED]))
            if item is None:
                return
            if isinstance(item, pb.AttachRequest):
                yield item
