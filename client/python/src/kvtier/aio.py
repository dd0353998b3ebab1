"""The client for asyncio.

Calls run on a few threads of their own, so that the event loop never waits for a node or for a copy. Leases,
attempts and tickets are those of `kvtier`: reading an array in place needs no await.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

from kvtier._memory import Bytes
from kvtier.attempt import Attempt
from kvtier.client import Client
from kvtier.errors import KvtierError
from kvtier.lease import Lease
from kvtier.ticket import Ticket
from kvtier.words import ItemOutcome, Layout, Namespace, Prefix, Reason, Retention, WriteOutcome

T = TypeVar("T")

_THREADS = 8  # calls in flight at once; more wait for their turn


class AsyncClient:
    """`Client` with awaitable calls. Arguments are those of the methods of the same name.

    A call that is cancelled goes on in its thread until it ends; what it is granted then is given back.
    """

    def __init__(self, client: Client) -> None:
        """Takes the client over: `close` closes it."""
        self.client = client
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-aio")

    @classmethod
    async def open(cls, socket: str = "", **settings: Any) -> AsyncClient:
        """Makes a Client without holding up the loop."""
        return cls(await asyncio.get_running_loop().run_in_executor(None, lambda: Client(socket, **settings)))

    async def _run(self, call: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        future = self._threads.submit(call)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if undo is not None:
                _undo_later(future, undo)
            raise

    async def wait_ready(self, timeout: float) -> None:
        await self._run(lambda: self.client.wait_ready(timeout))

    async def register(self, layout: Layout, salt: bytes = b"") -> Namespace:
        return await self._run(lambda: self.client.register(layout, salt))

    async def lookup(self, ns: Namespace, names: Sequence[bytes], **options: Any) -> Prefix:
        return await self._run(lambda: self.client.lookup(ns, names, **options))

    async def fetch(self, ns: Namespace, names: Sequence[bytes], **options: Any) -> Lease:
        return await self._run(lambda: self.client.fetch(ns, names, **options), lambda lease: lease.release(wait=False))

    async def adopt(self, ns: Namespace, token: bytes, **options: Any) -> Lease:
        return await self._run(lambda: self.client.adopt(ns, token, **options), lambda lease: lease.release(wait=False))

    async def release(self, lease: Lease) -> None:
        """`Lease.release`, which asks the node."""
        await self._run(lease.release)

    async def reserve(self, ns: Namespace, names: Sequence[bytes], **options: Any) -> Attempt:
        return await self._run(lambda: self.client.reserve(ns, names, **options), Attempt.abort)

    async def commit(self, attempt: Attempt, **options: Any) -> list[WriteOutcome]:
        return await self._run(lambda: attempt.commit(**options))

    async def abort(self, attempt: Attempt) -> None:
        await self._run(attempt.abort)

    async def write(
        self, ns: Namespace, names: Sequence[bytes], fill: Callable[[int, int, Bytes], None], **options: Any
    ) -> list[WriteOutcome]:
        """`Client.write`; fill is called on another thread."""
        return await self._run(lambda: self.client.write(ns, names, fill, **options))

    async def prefetch(self, ns: Namespace, names: Sequence[bytes], **options: Any) -> Ticket:
        return await self._run(lambda: self.client.prefetch(ns, names, **options), Ticket.cancel)

    async def wait(self, ticket: Ticket, timeout: float | None = None) -> Reason:
        """Waits for the end of a prefetch."""
        return await self._run(lambda: ticket.wait(timeout))

    async def ready(self, ticket: Ticket) -> AsyncIterator[int]:
        """The index of each block of a prefetch as it becomes ready."""
        blocks = iter(ticket)
        while (block := await self._run(lambda: next(blocks, None))) is not None:
            yield block

    async def retain(self, ns: Namespace, names: Sequence[bytes], retention: Retention) -> list[ItemOutcome]:
        return await self._run(lambda: self.client.retain(ns, names, retention))

    async def demote(self, ns: Namespace, names: Sequence[bytes]) -> list[ItemOutcome]:
        return await self._run(lambda: self.client.demote(ns, names))

    async def drop(self, ns: Namespace, names: Sequence[bytes]) -> list[ItemOutcome]:
        return await self._run(lambda: self.client.drop(ns, names))

    async def pin(self, ns: Namespace, names: Sequence[bytes], ttl: float) -> list[ItemOutcome]:
        return await self._run(lambda: self.client.pin(ns, names, ttl))

    async def close(self) -> None:
        """Closes the client and joins the threads."""

        def close() -> None:
            self.client.close()
            self._threads.shutdown()

        await asyncio.get_running_loop().run_in_executor(None, close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _undo_later(future: Future[T], undo: Callable[[T], None]) -> None:
    """Gives back what a call that nobody waits for any more was granted."""

    def done(ended: Future[T]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            with contextlib.suppress(KvtierError):
                undo(ended.result())

    future.add_done_callback(done)
