"""The client of one node."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import grpc
import numpy as np

from kvtier import _stream, _writing
from kvtier._keeper import Keeper
from kvtier._link import Link, Times
from kvtier._memory import SLOT, Bytes
from kvtier._retaining import Retaining
from kvtier._rpc import Target
from kvtier.attempt import Attempt, accept, check_lengths
from kvtier.errors import (
    ClosedError,
    InvalidError,
    KvtierError,
    UnavailableError,
    again,
)
from kvtier.lease import Hold, Lease
from kvtier.ticket import Ticket
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import (
    PROTOCOL_VERSION,
    Layout,
    Mode,
    Namespace,
    Prefix,
    Reason,
    Retention,
    Tier,
    WriteOutcome,
    number,
    pack,
    part_numbers,
    seconds,
    shortfalls,
    span,
    tiers,
)

log = logging.getLogger("kvtier")

DEFAULT_SOCKET = "/run/kvtier/kvtier.sock"

_ANSWER_TIME = 0.002  # kept of a caller's deadline for the answer to travel
_RESERVE_TIME = 1.0  # what a node takes for room if it is told no time

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client(Retaining):
    """Uses one node, from any number of threads.

    With `socket` it attaches to a node on this machine, and pages are read and written in place. With
    `address` (host:port) the bytes of pages are streamed into and out of memory of this process.

    A node that is absent is no error: calls raise UnavailableError at once, a cache miss, until the client
    has attached, which it keeps trying. A node that refuses this client is (DeniedError, IncompatibleError).
    """

    def __init__(
        self,
        socket: str = "",
        *,
        address: str = "",
        tls: grpc.ChannelCredentials | None = None,
        token: str = "",
        engine: str = "python",
        engine_version: str = "",
        group: str = "",
        group_secret: bytes = b"",
        ranks: Sequence[int] = (),
        staging_bytes: int = 0,  # of pages being written; 0: the node's default, 64 MiB with address
        private_bytes: int = 1 << 30,  # bound of the pages that streamed leases hold
        call_timeout: float = 5.0,  # of a call that names none, beside the time that it gives the node
        stall_timeout: float = 0.048,  # silence of a node that is being asked, after which calls fail at once
        dial_timeout: float = 2.0,
        max_hold: float = 600.0,  # over which a held lease is renewed by itself
    ) -> None:
        if not socket and not address:
            socket = DEFAULT_SOCKET
        self._target = Target(socket, address, tls, token)
        self._target.validate()
        if bool(group) != bool(group_secret) or (group_secret and not 16 <= len(group_secret) <= 64):
            raise InvalidError("a group needs a name and a secret of 16 to 64 bytes")
        if min(call_timeout, stall_timeout, dial_timeout, max_hold) <= 0 or min(staging_bytes, private_bytes) < 0:
            raise InvalidError("timeouts are positive, and sizes not negative")
        self.times = Times(call_timeout, stall_timeout, dial_timeout, max_hold)
        self.ranks = tuple(ranks)
        self.private = _stream.Budget(private_bytes)
        self.staged = _stream.Budget(staging_bytes or 64 << 20)
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            engine=engine,
            engine_version=engine_version,
            group_id=group,
            group_secret=group_secret,
            staging_bytes=staging_bytes,
            ranks=ranks,
        )
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, Namespace] = {}
        self._keeper = Keeper(self._target, self.times, hello, self._register_all)
        self._keeper.start()
        _open_clients.add(self)

    def _up(self) -> Link:
        return self._keeper.up()

    def _attached(self, verb: str) -> Link:
        link = self._up()
        if link.streamed:
            raise InvalidError(f"{verb} needs an attachment: make the client with socket=")
        return link

    def _register_all(self, link: Link) -> None:
        for ns in list(self._namespaces.values()):
            try:
                self._register(link, ns.layout, ns.salt)
            except UnavailableError:
                raise
            except KvtierError as e:
                log.warning("namespace %s is refused after the restart of the node: %s", ns, e)

    @property
    def attached(self) -> bool:
        """Calls have a node to go to."""
        return self._keeper.attached

    @property
    def streamed(self) -> bool:
        """Pages are copied over the connection and not read in place."""
        return bool(self._target.address)

    @property
    def socket(self) -> str:
        """Path of the node's socket; empty if streamed."""
        return self._target.socket

    @property
    def attachment(self) -> bytes:
        """The id by which the node knows this client now; empty if streamed or not attached."""
        link = self._keeper.link
        return link.attachment if link is not None else b""

    @property
    def tenant(self) -> str:
        """The tenant that the node knows this client by; empty if streamed or not attached."""
        link = self._keeper.link
        return link.tenant if link is not None else ""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the node's memory that this process has mapped for new leases."""
        link = self._keeper.link
        return link.extents.mapped_bytes if link is not None and link.extents is not None else 0

    def wait_ready(self, timeout: float) -> None:
        """Waits until the client is attached; after timeout seconds it raises why it is not."""
        self._keeper.wait_ready(timeout)

    def close(self) -> None:
        """Ends the attachment and with it every lease, attempt and ticket. Idempotent.

        Arrays that exist stay readable, and the node does not reuse their memory before they are gone.
        """
        self._keeper.close()
        _open_clients.discard(self)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Namespaces.

    def register(self, layout: Layout, salt: bytes = b"") -> Namespace:
        """Makes a namespace known to the node, now and after each restart. BadLayoutError names the field."""
        ns = self._register(self._up(), layout, salt)
        with self._lock:
            self._namespaces[ns.id] = ns
        return ns

    def _register(self, link: Link, layout: Layout, salt: bytes) -> Namespace:
        request = pb.RegisterNamespaceRequest(layout=layout.to_wire(), salt=salt, attachment=link.attachment)
        answer = link.unary(link.methods.register, request, "register namespace", self.times.call)
        if len(answer.namespace_id) != 32:
            raise InvalidError(f"register namespace: id of {len(answer.namespace_id)} bytes")
        return Namespace(answer.namespace_id, layout, salt)

    # Reading.

    def lookup(
        self, ns: Namespace, names: Sequence[bytes], parts: int = 0, call_timeout: float | None = None
    ) -> Prefix:
        """Tells the usable prefix of a chain and the tier of each block. It pins nothing."""
        request = pb.LookupRequest(namespace_id=ns.id, block_names=pack(names), parts=parts)
        link = self._up()
        answer = link.unary(link.methods.lookup, request, "lookup", call_timeout or self.times.call)
        if len(answer.tiers) != len(names) or answer.usable_blocks > len(names):
            raise InvalidError(f"lookup: {len(answer.tiers)} tiers for {len(names)} blocks")
        return Prefix(answer.usable_blocks, answer.usable_tokens, tiers(answer.tiers))

    def fetch(
        self,
        ns: Namespace,
        names: Sequence[bytes],
        *,
        first: int = 0,
        prefix: Lease | None = None,
        parts: int = 0,
        mode: Mode = Mode.PREFIX,
        wanted: Tier = Tier.NONE,
        timeout: float = 0.0,
        ttl: float = 0.0,
        for_group: bool = False,
        call_timeout: float | None = None,
    ) -> Lease:
        """Makes the pages of the usable prefix (or of a set) present, and leases them.

        timeout: seconds that the node may take to bring pages up; 0: only what is there now. What cannot be
        had is a shortfall of the lease, not an error. first: position of the first name in its chain; prefix:
        a held lease of the blocks before it.
        """
        link = self._up()
        if link.streamed:
            return _stream.fetch(self, link, ns, names, first, parts, mode, call_timeout)
        budget = timeout + self.times.call
        if call_timeout is not None:
            budget, timeout = call_timeout, max(min(timeout, call_timeout - _ANSWER_TIME), 0)
        request = pb.FetchRequest(
            namespace_id=ns.id,
            block_names=pack(names),
            prefix_lease=prefix.id if prefix is not None else 0,
            parts=parts,
            mode=number(mode),
            wanted_tier=number(wanted),
            timeout=span(timeout),
            lease_ttl=span(ttl),
            for_group=for_group,
            first_block=first,
        )
        answer = link.ask(pb.AttachRequest(fetch=request), budget)
        if not answer.HasField("fetch"):
            raise InvalidError("fetch: the node answered something else")
        got = answer.fetch
        try:
            return self._leased(link, ns, got, got.parts or parts, got.tiers, mode, len(names))
        except BaseException:
            link.abandon(got.lease_id, got.adopt_token)
            raise

    def _leased(
        self,
        link: Link,
        ns: Namespace,
        got: pb.FetchResponse | pb.AdoptResponse,
        parts: int,
        levels: bytes,
        mode: Mode,
        most: int,
    ) -> Lease:
        """Checks what the node granted, maps it, and puts it on the books."""
        fetched = got if isinstance(got, pb.FetchResponse) else None
        short = shortfalls(fetched.shortfalls) if fetched is not None else []
        if not got.lease_id:
            return Lease(parts=parts, shortfalls=short)
        columns = part_numbers(parts or ns.layout.all_parts)
        slots = np.frombuffer(got.slots, SLOT)
        if not slots.size or slots.size % len(columns):
            raise InvalidError(f"slot table of {len(got.slots)} bytes for {len(columns)} parts")
        rows = slots.size // len(columns)
        if rows > most or got.usable_blocks > rows or (levels and len(levels) != rows):
            raise InvalidError(f"{got.usable_blocks} usable blocks, {rows} rows, {len(levels)} tiers for {most} blocks")
        check_lengths(slots, columns, ns)
        assert link.extents is not None
        maps = link.extents.resolve(slots, staging=False)
        hold = Hold(link, got.lease_id, maps, (seconds(fetched.lease_ttl) if fetched is not None else 0) or link.ttl)
        link.register(hold)
        return Lease(
            parts=parts or ns.layout.all_parts,
            usable_blocks=got.usable_blocks,
            usable_tokens=fetched.usable_tokens if fetched is not None else 0,
            rows=rows,
            tiers=tiers(levels),
            shortfalls=short,
            adopt_token=fetched.adopt_token if fetched is not None else b"",
            hold=hold,
            slots=slots,
        )

    def adopt(self, ns: Namespace, token: bytes, parts: int = 0, call_timeout: float | None = None) -> Lease:
        """The pages of this member's parts (0: those of its ranks) of a fetch that the group decided on."""
        link = self._attached("adopt")
        request = pb.AttachRequest(adopt=pb.AdoptRequest(adopt_token=token, parts=parts))
        answer = link.ask(request, call_timeout or self.times.call)
        if not answer.HasField("adopt"):
            raise InvalidError("adopt: the node answered something else")
        got = answer.adopt
        try:
            return self._leased(link, ns, got, got.parts, b"", Mode.SET, 1 << 16)
        except BaseException:
            link.abandon(got.lease_id, b"")
            raise

    def drop_decision(self, token: bytes) -> None:
        """Ends a decision that fetch made for the group. It does not wait for the node."""
        self._attached("drop decision").abandon(0, token)

    def renew(self, leases: Sequence[Lease] = (), ttl: float = 0.0) -> None:
        """Extends leases to ttl seconds from now (0: the node's default). With no lease it is the cheapest call."""
        link = self._attached("renew")
        for lease in leases:
            if lease.ended is not None:
                raise again(lease.ended)
        renew = pb.RenewRequest(lease_ids=[lease.id for lease in leases], lease_ttl=span(ttl))
        unknown = link.ask(pb.AttachRequest(renew=renew), self.times.call).renew.unknown
        if unknown:
            raise ClosedError(f"renew: leases {list(unknown)} are not held any more")

    # Writing.

    def reserve(
        self,
        ns: Namespace,
        names: Sequence[bytes],
        *,
        first: int = 0,
        parts: int = 0,
        ttl: float = 0.0,
        timeout: float = 0.0,
    ) -> Attempt:
        """Memory to fill for a leading part of the blocks; Attempt.outcomes says why the rest has none.

        ttl: seconds after which it cannot be committed any more; 0: 60. timeout: seconds that the node may
        take to make room; 0: 1.
        """
        link = self._up()
        if link.streamed:
            return _stream.reserve(self, link, ns, names, first, parts)
        request = pb.ReserveRequest(
            attachment=link.attachment,
            namespace_id=ns.id,
            block_names=pack(names),
            first_block=first,
            parts=parts,
            ttl=span(ttl),
            timeout=span(timeout),
            attempt=os.urandom(16),
        )
        with link.lock:
            link.reserving += 1
        try:
            answer = link.unary(link.methods.reserve, request, "reserve", self.times.call + (timeout or _RESERVE_TIME))
            return accept(link, ns, len(names), answer)
        except BaseException:
            # Whatever was granted nobody will use: the name was ours, so the node can be told without an answer.
            abort = pb.AbortRequest(attachment=link.attachment, attempt=request.attempt)
            link.mux.send(pb.AttachRequest(abort=abort), answered=False)
            raise
        finally:
            with link.lock:
                link.reserving -= 1

    def write(
        self,
        ns: Namespace,
        names: Sequence[bytes],
        fill: Callable[[int, int, Bytes], None],
        *,
        first: int = 0,
        parts: int = 0,
        durable: bool = False,
        retention: Retention | None = None,
        timeout: float | None = None,
    ) -> list[WriteOutcome]:
        """Writes blocks in as many rounds as the staging needs.

        fill(block, part, page) is called for each page that the node wants, with the index of the block in
        names, and fills page to its end. NO_SPACE and OVER_QUOTA end the call with the rest NOT_REACHED.
        timeout bounds it all, in seconds.
        """
        writer = _writing.Writer(self, ns, names, fill, first, parts, durable, retention, timeout)
        return writer.run()

    # Prefetch. Retention is Retaining's.

    def prefetch(
        self,
        ns: Namespace,
        names: Sequence[bytes],
        *,
        parts: int = 0,
        tier: Tier = Tier.NONE,
        priority: int = 0,
        timeout: float = 0.0,
    ) -> Ticket:
        """Starts bringing pages up and returns at once. timeout: seconds after which they are not wanted; 0: 30."""
        link = self._attached("prefetch")
        if not 0 <= priority <= 100:
            raise InvalidError(f"prefetch: priority {priority}, want 0 to 100")
        request = pb.PrefetchRequest(
            attachment=link.attachment,
            namespace_id=ns.id,
            block_names=pack(names),
            parts=parts,
            tier=number(tier),
            priority=priority,
            timeout=span(timeout),
        )
        with link.lock:
            link.asking += 1
        try:
            answer = link.unary(link.methods.prefetch, request, "prefetch", self.times.call)
            ticket = Ticket(link, answer.ticket, len(names), answer.admitted_blocks, answer.refused_blocks)
            if answer.ticket:
                link.enroll(ticket)
            else:
                ticket.finish(Reason.NONE)
            return ticket
        finally:
            link.asked()


@atexit.register
def _close_all() -> None:
    """Threads must not be in gRPC's calls when the interpreter goes down."""
    for client in list(_open_clients):
        client.close()
