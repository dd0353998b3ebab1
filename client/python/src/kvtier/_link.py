"""One connection to one run of a node: with a socket an attachment, with an address a plain connection.

The keeper makes it; it is used until it fails, and never repaired: the keeper makes another.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from kvtier import _fork
from kvtier._handoff import Tether
from kvtier._memory import ExtentSet
from kvtier._mux import RELEASE, REVOKED, Mux
from kvtier._rpc import Answer, Method, Methods, Request, Target
from kvtier._stall import STALL_TICKS, Stall, Verdict
from kvtier.errors import (
    UNANSWERED,
    DeniedError,
    ExpiredError,
    IncompatibleError,
    InvalidError,
    KvtierError,
    UnavailableError,
    UnknownAttachmentError,
    again,
    from_detail,
    from_rpc,
)
from kvtier.lease import Hold, dead_error, revoked_error
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import PROTOCOL_VERSION, Reason, seconds, span

if TYPE_CHECKING:
    from kvtier.attempt import Attempt
    from kvtier.ticket import Ticket

log = logging.getLogger("kvtier")

_REST_TICKS = 128  # without a call put the watch to rest: an idle engine costs nothing
_MIN_RENEW = 0.05  # seconds: pace of renewals where leases are very short
_DEFAULT_TTL = 30.0
_MAX_UNTOLD = 1024  # events of tickets whose call has not returned yet


@dataclass(frozen=True)
class Times:
    """The bounds of waits, in seconds."""

    call: float = 5.0
    stall: float = 0.048
    dial: float = 2.0
    hold: float = 600.0


class Link:
    def __init__(self, target: Target, times: Times, mended: Callable[[], None]) -> None:
        self.times, self.metadata, self._mended = times, target.metadata, mended  # a silent node is heard again
        self.streamed = not target.socket
        self.failed: KvtierError | None = None
        self.silent = False  # the breaker is open
        self.attachment = b""
        self.tenant = ""
        self.ttl = _DEFAULT_TTL
        self.heard = 0  # messages and answers received
        self.leases: dict[int, weakref.ref[Hold]] = {}
        self.attempts: set[Attempt] = set()
        self.tickets: dict[int, Ticket] = {}
        self.lock = threading.Lock()  # of the three above where more than one step is taken, and of what follows
        self.freed = threading.Condition(self.lock)  # staging was given back
        self.reserving = 0
        self.asking = 0  # prefetch calls in flight
        self._untold: list[pb.PrefetchProgress] = []
        self._early: deque[int] = deque(maxlen=64)  # leases revoked before they were known
        self._begun = 0
        self._looks_at = math.inf  # when the watch looks at the clock next
        self._resting = self._pinging = False
        self._unary: set[Any] = set()  # calls in flight
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._wake_lock = threading.Lock()
        self._channel = target.channel()
        self.methods = Methods(self._channel)
        self.mux = Mux(self._event)
        self.extents: ExtentSet | None = None
        self._tether: Tether | None = None
        self._stream: Any = None
        self._reader: threading.Thread | None = None
        self._was_ready = False
        _fork.keep_after_fork(self)

    # Connecting.

    def attach(self, hello: pb.Hello) -> weakref.ref[Tether]:
        """Opens the attachment stream and the tether, within Times.dial."""
        welcomed = threading.Event()
        welcome: list[pb.AttachResponse] = []
        stream = self.methods.attach(self.mux.requests(), metadata=self.metadata)
        self._stream = stream

        def read() -> None:
            try:
                for message in stream:
                    self.heard += 1
                    if not welcome:
                        welcome.append(message)
                        welcomed.set()
                        continue
                    self.mux.deliver(message)
                self.fail(UnavailableError("the node ended the attachment"))
            except grpc.RpcError as e:
                self.fail(from_rpc(e, "attach" if not welcome else "attachment stream"))
            except Exception as e:  # a message that breaks the protocol ends the link, not the process
                self.fail(IncompatibleError(f"attachment stream: {e!r}"))
            finally:
                welcomed.set()

        self._reader = threading.Thread(target=read, name="kvtier-stream", daemon=True)
        self._reader.start()
        self.mux.send(pb.AttachRequest(hello=hello), answered=True)
        if not welcomed.wait(self.times.dial):
            raise UnavailableError(f"attach: no answer within {self.times.dial} s")
        if not welcome:
            raise again(self.failed) if self.failed else UnavailableError("attach: the node ended the stream")
        self._accept(welcome[0])
        assert self._tether is not None
        return weakref.ref(self._tether)

    def _accept(self, message: pb.AttachResponse) -> None:
        if message.HasField("error"):
            raise from_detail(message.error, "attach")
        w = message.welcome
        if len(w.attachment) != 16 or not w.handoff_socket:
            raise IncompatibleError("attach: the node's welcome is malformed")
        if w.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleError(
                f"attach: the node speaks protocol {w.protocol_version}, this client {PROTOCOL_VERSION}"
            )
        self.attachment, self.tenant = w.attachment, w.tenant
        self.ttl = seconds(w.lease_ttl) or _DEFAULT_TTL
        self._tether = Tether(w.handoff_socket, w.attachment, self.times.dial)
        self.extents = ExtentSet(self._tether)

    def greet(self, address: str) -> None:
        """Makes sure that a node answers at the address, with an empty renew."""
        self._channel.subscribe(self._connectivity)
        try:
            self.unary(self.methods.renew, pb.RenewRequest(), "connect to " + address, self.times.dial, wait=True)
        except DeniedError:
            raise
        except (UnavailableError, ExpiredError) as e:
            raise UnavailableError(f"no node answers at {address}: {e}") from e
        except KvtierError:
            pass  # whatever it says, it answers

    def _connectivity(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._was_ready = True
        elif self._was_ready or state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self.fail(UnavailableError("the connection to the node was lost"))

    # Calls.

    def fail(self, error: KvtierError) -> None:
        """Ends the link; the first reason stays."""
        if self.failed is None:
            self.failed = error
        self.wake()

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def called(self) -> None:
        """Notes the begin of a call and wakes a resting watch."""
        self._begun += 1
        if self._resting:
            self._resting = False
            self.wake()

    def ask(self, request: pb.AttachRequest, timeout: float) -> pb.AttachResponse:
        self.called()
        return self.mux.ask(request, timeout)

    def unary(
        self, method: Method[Request, Answer], request: Request, verb: str, timeout: float, wait: bool | None = None
    ) -> Answer:
        """Makes one unary call. verb begins its errors."""
        self.called()
        call = method.future(request, timeout=timeout, metadata=self.metadata, wait_for_ready=wait)
        self._unary.add(call)
        try:
            if self.failed is not None or self.silent:
                call.cancel()
            answer = call.result()
            self.heard += 1
            return answer
        except grpc.FutureCancelledError:
            why = self.failed or UnavailableError("the node does not answer")
            raise UnavailableError(f"{verb}: {why}") from None
        except grpc.RpcError as e:
            if e.code() not in UNANSWERED:
                self.heard += 1
            raise self._typed(from_rpc(e, verb)) from None
        finally:
            self._unary.discard(call)

    def _typed(self, error: KvtierError) -> KvtierError:
        if isinstance(error, UnknownAttachmentError) and not self.streamed:
            self.fail(UnavailableError(f"the node does not know the attachment: {error}"))
            return UnavailableError(str(error))
        return error

    def ask_release(self, lease: int) -> bool:
        """Releases and tells whether the node says that what was read is lost; one-way if it cannot be asked."""
        if self.failed is None and not self.silent:
            request = pb.AttachRequest(release=pb.ReleaseRequest(lease_ids=[lease]))
            try:
                return lease in self.ask(request, self.times.call).release.lost
            except KvtierError:
                pass  # the generations have been compared; the node is told once it hears again
        self.mux.post((RELEASE, lease))
        return False

    # What the stream says unasked. The reader calls these; they do not block.

    def _event(self, message: pb.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "revocation":
            self._revoke(list(message.revocation.lease_ids))
        elif kind == "prefetch":
            self._progress(message.prefetch)
        elif kind == "stopping":
            log.info("node is stopping within %.1f s", seconds(message.stopping.within))
        elif kind == "fetch":
            self.abandon(message.fetch.lease_id, message.fetch.adopt_token)
        elif kind == "adopt":
            self.abandon(message.adopt.lease_id, b"")

    def abandon(self, lease: int, adopt_token: bytes) -> None:
        """Gives back what was granted to a caller that did not wait."""
        if lease:
            self.mux.post((RELEASE, lease))
        if adopt_token:
            self.mux.send(pb.AttachRequest(release=pb.ReleaseRequest(adopt_tokens=[adopt_token])), answered=False)

    def _revoke(self, ids: list[int]) -> None:
        for lease in ids:
            with self.lock:
                ref = self.leases.get(lease)
                hold = ref() if ref is not None else None
                if hold is None:
                    self._early.append(lease)
            if hold is not None:
                hold.end(revoked_error(lease), REVOKED)
            else:
                self.mux.post((REVOKED, lease))

    def register(self, hold: Hold) -> None:
        """Puts a lease on the books: it is renewed and can be revoked from now on."""
        now = time.monotonic()
        hold.renew_at = now + max(hold.ttl / 2, _MIN_RENEW)
        hold.held_until = now + self.times.hold
        with self.lock:
            if self.failed is not None:
                raise again(self.failed)
            if hold.id in self.leases:
                raise InvalidError(f"the node granted lease {hold.id} twice")
            self.leases[hold.id] = weakref.ref(hold)
            early = hold.id in self._early
        if hold.renew_at < self._looks_at:
            self.wake()
        if early:
            hold.end(revoked_error(hold.id), "")

    def finished(self, lease: int, note: str) -> None:
        """A lease that nobody reads any more. Called by finalizers: no lock is taken."""
        if self.leases.pop(lease, None) is not None and note and self.failed is None:
            self.mux.post((note, lease))

    def _progress(self, progress: pb.PrefetchProgress) -> None:
        with self.lock:
            ticket = self.tickets.get(progress.ticket)
            if ticket is None and self.asking and len(self._untold) < _MAX_UNTOLD:
                self._untold.append(progress)
        if ticket is not None:
            ticket.note(progress)

    def enroll(self, ticket: Ticket) -> None:
        """Puts a ticket on the books and tells it the events that came before."""
        with self.lock:
            early = [p for p in self._untold if p.ticket == ticket.id]
            if self.failed is None:
                self.tickets[ticket.id] = ticket
        if self.failed is not None:
            ticket.finish(Reason.ATTACHMENT_ENDED)
        for progress in early:
            ticket.note(progress)

    def asked(self) -> None:
        """A prefetch call has returned."""
        with self.lock:
            self.asking -= 1
            if not self.asking:
                self._untold.clear()

    # The watch: the keeper's thread runs it until the link fails.

    def run(self) -> None:
        stall = Stall(self.times.stall / (STALL_TICKS + 1))
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        tether = self._tether
        if tether is not None:
            poll.register(tether.fileno(), select.POLLIN)
        idle, begun = 0, self._begun
        while self.failed is None:
            self._resting = idle >= _REST_TICKS and not stall.open
            if self._resting and self._begun != begun:
                self._resting = False
            if self._resting:
                stall.pause()
            for fd, _ in poll.poll(self._wait(None if self._resting else stall.interval)):
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif tether is not None:
                    self._receive(tether)
            busy = self._begun != begun or self._in_flight()
            idle, begun = (0 if busy else idle + 1), self._begun
            self._tick(stall, time.monotonic())

    def _wait(self, interval: float | None) -> int:
        """Milliseconds until the watch looks again; register wakes it for a lease that is due earlier."""
        self._looks_at = math.inf  # a lease that comes while we look wakes it too
        due = min((h.renew_at for h in self._held()), default=None)
        wait = 3600.0 if interval is None else interval
        now = time.monotonic()
        if due is not None:
            wait = min(wait, max(due - now, 0))
        self._looks_at = now + wait
        return int(wait * 1000) + 1

    def _held(self) -> list[Hold]:
        holds = (ref() for ref in list(self.leases.values()))
        return [h for h in holds if h is not None and h.why is None and h.renew_at <= h.held_until]

    def _in_flight(self) -> int:
        return self.mux.waiting + len(self._unary)

    def _receive(self, tether: Tether) -> None:
        try:
            assert self.extents is not None
            self.extents.add(tether.receive())
        except (OSError, KvtierError) as e:
            self.fail(e if isinstance(e, KvtierError) else UnavailableError(f"hand-off socket: {e}"))

    def _tick(self, stall: Stall, now: float) -> None:
        verdict = stall.tick(now, self._in_flight(), self.heard)
        if verdict is Verdict.PING:
            self._ping()
        elif verdict is Verdict.TRIP:
            log.warning("node does not answer: calls fail until it is heard again")
            self.silent = True
            self.mux.fail_all(
                UnavailableError(f"the node was silent for {self.times.stall * 1000:.0f} ms"), closing=False
            )
            for call in list(self._unary):
                call.cancel()
        elif verdict is Verdict.MEND:
            self.silent = False
            log.info("node answers again")
            self._mended()
        if self.streamed:
            if stall.open:  # a stream needs one ping only: it is answered when the node is back
                self._ping()
            return
        self._renew(now)

    def _ping(self) -> None:
        """Asks the node for a sign of life, unless it is being asked already."""
        if not self.streamed:
            self.mux.send(pb.AttachRequest(renew=pb.RenewRequest()), answered=True)
            return
        if self._pinging:
            return
        self._pinging = True
        call = self.methods.renew.future(pb.RenewRequest(), timeout=self.times.call, metadata=self.metadata)
        call.add_done_callback(self._pinged)  # type: ignore[attr-defined]

    def _pinged(self, call: Any) -> None:
        if call.code() not in UNANSWERED:
            self.heard += 1
        self._pinging = False

    def _renew(self, now: float) -> None:
        """Extends the leases that are half way to their deadline. Beyond Times.hold one is left to it."""
        due: dict[float, list[int]] = {}
        for hold in self._held():
            if hold.renew_at <= now:
                due.setdefault(hold.ttl, []).append(hold.id)
                hold.renew_at = now + max(hold.ttl / 2, _MIN_RENEW)
        for ttl, ids in due.items():
            self.mux.send(pb.AttachRequest(renew=pb.RenewRequest(lease_ids=ids, lease_ttl=span(ttl))), answered=False)

    # The end.

    def close(self, why: KvtierError) -> None:
        """Ends the link and what hangs on it, and joins its reader. Arrays that exist stay readable."""
        self.fail(why)
        self.mux.fail_all(again(self.failed or why), closing=True)
        if self._stream is not None:
            self._stream.cancel()
        for call in list(self._unary):
            call.cancel()
        self._channel.close()
        if self._reader is not None:
            self._reader.join(self.times.dial)
        with self.lock:
            holds = [ref() for ref in list(self.leases.values())]
            attempts, tickets = list(self.attempts), list(self.tickets.values())
            self.tickets.clear()
            self.freed.notify_all()
        for hold in holds:
            if hold is not None:
                hold.end(dead_error(hold.id), "")
        for attempt in attempts:
            attempt.orphan()
        for ticket in tickets:
            ticket.finish(Reason.ATTACHMENT_ENDED)
        if self.extents is not None:
            self.extents.retire()
        self._tether = None
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1
        _fork.drop(self)
