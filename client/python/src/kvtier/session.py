"""Sessions: conversations that have one owner node, and move with their pages.

with kvtier.Session(client, "chat-42", ns, retention=kvtier.Retention(50)) as session:
    session.append(0, names)      # after their commit; never waits
    session.wait(5.0)             # a quorum has them
    for p in kvtier.migrate(client, "chat-42", "gpu-8"):
        print(p.state, p.sent_bytes)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import Message

from kvtier import _fork
from kvtier.client import Client
from kvtier.errors import (
    ClosedError,
    DeniedError,
    ExpiredError,
    ForkedError,
    FrozenError,
    InvalidError,
    KvtierError,
    LostError,
    MovedError,
    NoSpaceError,
    NotFoundError,
    again,
    from_rpc,
)
from kvtier.v1 import sessions_pb2 as pb
from kvtier.words import Namespace, Retention, Tier, pack, seconds

_SERVICE = "/kvtier.v1.SessionsService/"
_MOST_WAITING = 65_536  # blocks
_AT_ONCE = 4096  # blocks in one call
_FROZEN_PAUSE = 0.002
_LEAST_PAUSE, _MOST_PAUSE = 0.01, 1.0
_BRING_TIME = 600.0

# What no later try can mend.
_FINAL = (MovedError, NotFoundError, InvalidError, DeniedError, LostError, ClosedError)


def _call(client: Client, name: str, request: Message, answer: type[Any], timeout: float) -> Any:
    link = client._up()
    method: Any = link._channel.unary_unary(
        _SERVICE + name, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    return link.unary(method, request, name, timeout)


@dataclass(frozen=True)
class SessionInfo:
    """A session as it was when the node told of it."""

    session: str
    tenant: str
    owner: bytes  # node id
    owner_name: str
    owner_address: str  # of its gRPC port; empty: it has none
    epoch: int
    blocks: int
    tokens: int


def _info(m: pb.SessionInfo) -> SessionInfo:
    return SessionInfo(m.session, m.tenant, m.owner, m.owner_name, m.owner_address, m.epoch, m.blocks, m.tokens)


class Session:
    """A session that this process appends to. append never waits: what the node does not take at present (the
    session is being handed over, there is no quorum, the node restarts) is kept in order and sent as soon as it
    does. Safe for use from any number of threads.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        ns: Namespace,
        *,
        retention: Retention | None = None,
        names: Sequence[bytes] = (),  # the chain as the engine has it, for a takeover where the nodes lost it
        bring: bool = False,  # have it moved here first if another node owns it
        timeout: float | None = None,
    ) -> None:
        request = pb.OpenSessionRequest(
            session=name,
            namespace_id=ns.id,
            block_names=pack(names) if names else b"",
            elsewhere=pb.ELSEWHERE_BRING if bring else pb.ELSEWHERE_REFUSE,
        )
        if retention is not None:
            request.retention.CopyFrom(retention.to_wire())
        within = timeout or (_BRING_TIME if bring else client.times.call)
        answer: pb.OpenSessionResponse = _call(client, "OpenSession", request, pb.OpenSessionResponse, within)
        self.info = _info(answer.session)
        self.taken_over = answer.taken_over  # from an owner that is down
        self.lost_blocks = answer.lost_blocks  # at its end, with that owner
        self._client, self._name, self._forks = client, name, _fork.count()
        self._changed = threading.Condition()
        self._blocks = answer.session.blocks
        self._waiting: list[bytes] = []
        self._error: KvtierError | None = None
        self._thread = threading.Thread(target=self._flush, name=f"kvtier-session-{name}", daemon=True)
        self._thread.start()

    def append(self, first: int, names: Sequence[bytes]) -> None:
        """Says which blocks come next, from position first on: at most where the chain ends. Returns at once.

        NoSpaceError if 65,536 blocks wait already, InvalidError for a gap, else why nothing more is appended.
        """
        if self._forks != _fork.count():
            raise ForkedError(f"session {self._name}")
        with self._changed:
            if self._error is not None:
                raise again(self._error)
            end = self._blocks + len(self._waiting)
            if first > end:
                raise InvalidError(f"session {self._name}: blocks from {first} on, it ends at {end}")
            fresh = names[end - first :]
            if len(self._waiting) + len(fresh) > _MOST_WAITING:
                raise NoSpaceError(f"session {self._name}: {len(self._waiting)} blocks wait to be appended")
            self._waiting.extend(fresh)
            self._changed.notify_all()

    @property
    def blocks(self) -> int:
        """Blocks that a quorum has."""
        with self._changed:
            return self._blocks

    @property
    def error(self) -> KvtierError | None:
        """Why nothing more is appended: MovedError names the new owner. None: appends go on."""
        with self._changed:
            return self._error

    def rest(self) -> tuple[int, list[bytes]]:
        """What was not appended, and the position of the first: for the engine at the new owner."""
        with self._changed:
            return self._blocks, list(self._waiting)

    def wait(self, timeout: float) -> None:
        """Waits until nothing waits to be appended; ExpiredError after timeout seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._waiting and self._error is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ExpiredError(f"session {self._name}: {len(self._waiting)} blocks wait to be appended")
                self._changed.wait(left)
            if self._error is not None:
                raise again(self._error)

    def close(self) -> None:
        """Ends the appending; the session goes on. What waits is not appended: see wait. Idempotent."""
        self._end(ClosedError(f"session {self._name}"))
        if self._forks == _fork.count():
            self._thread.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _end(self, error: KvtierError) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def _flush(self) -> None:
        pause = _LEAST_PAUSE
        while True:
            with self._changed:
                while not self._waiting and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    return
                first, some = self._blocks, self._waiting[:_AT_ONCE]
            try:
                request = pb.AppendSessionRequest(session=self._name, first_block=first, block_names=pack(some))
                _call(self._client, "AppendSession", request, pb.AppendSessionResponse, self._client.times.call)
            except FrozenError:
                self._rest_for(_FROZEN_PAUSE)
            except _FINAL as e:
                self._end(e)
            except KvtierError:  # the node, or the quorum, is away for a while
                self._rest_for(pause)
                pause = min(2 * pause, _MOST_PAUSE)
            else:
                pause = _LEAST_PAUSE
                with self._changed:
                    self._blocks += len(some)
                    del self._waiting[: len(some)]
                    self._changed.notify_all()

    def _rest_for(self, pause: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None, pause)


@dataclass(frozen=True)
class MoveProgress:
    """How far a move is; the last one has ended."""

    state: str  # "done": it moved; "aborted" and "superseded": it did not, why tells
    ended: bool
    sent_bytes: int
    left_bytes: int
    pause: float  # seconds that appends were refused
    why: str


@dataclass(frozen=True)
class SessionEvent:
    """How a session is now. Of several changes in a row only the last may be told."""

    session: str
    gone: bool  # it was closed, or its time was over
    state: str  # "active", "migrating" or "frozen"
    owner: bytes  # node id
    owner_address: str
    epoch: int  # it rises when the session moved
    blocks: int


def _stream(
    client: Client, name: str, request: Message, answer: type[Any], stop: Callable[[Any], bool]
) -> Iterator[Any]:
    link = client._up()
    method: Any = link._channel.unary_stream(
        _SERVICE + name, request_serializer=type(request).SerializeToString, response_deserializer=answer.FromString
    )
    call: Any = method(request, metadata=link.metadata)
    try:
        for message in call:
            yield message
            if stop(message):
                return
    except grpc.RpcError as e:
        raise from_rpc(e, name) from None
    finally:
        call.cancel()


def migrate(
    client: Client, session: str, to: str, *, max_bytes_per_second: int = 0, tier: Tier = Tier.NONE
) -> Iterator[MoveProgress]:
    """Moves a session to a node (name, or digits of its id) and tells how far that is, until it has ended. The move
    goes on if the iterator is dropped."""
    request = pb.MigrateSessionRequest(
        session=session,
        to=to,
        max_bytes_per_second=max_bytes_per_second,
        tier=int(tier),  # type: ignore[arg-type]
    )
    for m in _stream(client, "MigrateSession", request, pb.MigrateSessionResponse, lambda m: m.progress.ended):
        if m.HasField("progress"):
            p = m.progress
            yield MoveProgress(p.state, p.ended, p.sent_bytes, p.left_bytes, seconds(p.pause), p.why)


def watch(client: Client, sessions: Sequence[str] = ()) -> Iterator[SessionEvent]:
    """Tells what becomes of sessions (none: all of the tenant): first how each is, then each change, until the
    iterator is closed or the connection ends."""
    request = pb.WatchSessionsRequest(sessions=sessions)
    for m in _stream(client, "WatchSessions", request, pb.WatchSessionsResponse, lambda _: False):
        e = m.event
        state = "" if e.gone else pb_state(e.state)
        yield SessionEvent(e.session, e.gone, state, e.owner, e.owner_address, e.epoch, e.blocks)


def pb_state(state: int) -> str:
    """The lower-case name of a state of the wire."""
    return {1: "active", 2: "migrating", 3: "frozen"}.get(state, "unknown")


def close_session(client: Client, session: str) -> None:
    """Ends a session. Its blocks stay as any cached block does. One that is not known is success."""
    _call(client, "CloseSession", pb.CloseSessionRequest(session=session), pb.CloseSessionResponse, client.times.call)
