"""Keeps a client attached: makes a link, watches it until it fails, and makes another."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable

from kvtier import _fork
from kvtier._handoff import Tether
from kvtier._link import Link, Times
from kvtier._rpc import Target
from kvtier.errors import (
    ClosedError,
    DeniedError,
    ForkedError,
    IncompatibleError,
    InvalidError,
    KvtierError,
    NoSpaceError,
    UnavailableError,
    again,
)
from kvtier.v1 import pages_pb2 as pb

log = logging.getLogger("kvtier")

_BACKOFF_LEAST, _BACKOFF_MOST = 0.05, 2.0
_REFUSALS = (DeniedError, IncompatibleError, InvalidError)  # trying again is pointless until someone acts


class Keeper:
    """One thread, which ends with close. `restore` is called with each new link before calls use it."""

    def __init__(self, target: Target, times: Times, hello: pb.Hello, restore: Callable[[Link], None]) -> None:
        self._target, self._times, self._hello, self._restore = target, times, hello, restore
        self._forks = _fork.count()
        self._changed = threading.Condition()  # a link is there, is heard again, or will never be
        self._previous: tuple[bytes, weakref.ref[Tether]] | None = None  # the attachment that ended last
        self.link: Link | None = None
        self._why: KvtierError = UnavailableError("not attached yet")
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Tries to attach once, and goes on trying behind. It raises what no later try would change."""
        first: Link | None = None
        try:
            first = self._connect()
        except KvtierError as e:
            if isinstance(e, _REFUSALS):
                raise
            self._why = _unavailable(e)
        self.link = first
        self._thread = threading.Thread(target=self._keep, args=(first,), name="kvtier-keeper", daemon=True)
        self._thread.start()

    def _connect(self) -> Link:
        self._target.probe(self._times.dial)
        link = Link(self._target, self._times, self._notify)
        try:
            if link.streamed:
                link.greet(self._target.address)
            else:
                self._attach(link)
            self._restore(link)
        except BaseException as e:
            link.close(e if isinstance(e, KvtierError) else UnavailableError(str(e)))
            raise
        return link

    def _attach(self, link: Link) -> None:
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        if self._previous is not None and self._previous[1]() is None:
            hello.previous_attachment = self._previous[0]  # no mapping of it is left in this process
        tether = link.attach(hello)
        self._previous = (link.attachment, tether)

    def _keep(self, link: Link | None) -> None:
        wait, said = _BACKOFF_LEAST, ""
        while True:
            if link is not None:
                began = time.monotonic()
                link.run()
                why = link.failed or UnavailableError("the link ended")
                if not self._closing.is_set():
                    log.warning("attachment lost, attaching again: %s", why)
                self._publish(None, why)
                link.close(why)
                link = None
                if time.monotonic() - began > _BACKOFF_MOST:
                    wait = _BACKOFF_LEAST
            if self._closing.wait(wait * random.uniform(0.5, 1.0)):
                return
            wait = min(2 * wait, _BACKOFF_MOST)
            try:
                link = self._connect()
            except KvtierError as e:
                if str(e) != said and not self._closing.is_set():
                    said = str(e)
                    log.warning("cannot attach, trying again: %s", e)
                self._publish(None, e)
                continue
            said = ""
            log.info("attached")
            self._publish(link, None)

    def _publish(self, link: Link | None, why: KvtierError | None) -> None:
        with self._changed:
            self.link = link
            if why is not None:
                self._why = _unavailable(why)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def up(self) -> Link:
        """The link that a call uses. Where there is none, or its node is silent, the call costs nothing more."""
        link = self.link
        if self._forks != _fork.count():
            raise ForkedError("this client was made before a fork")
        if link is not None and not link.silent and link.failed is None:
            return link
        if self._closing.is_set():
            raise ClosedError("the client was closed")
        if link is not None:
            raise UnavailableError("the node does not answer")
        raise again(self._why)

    @property
    def attached(self) -> bool:
        link = self.link
        return link is not None and link.failed is None and not link.silent and self._forks == _fork.count()

    def wait_ready(self, timeout: float) -> None:
        """Waits until up() gives a link; after timeout seconds it raises why not. Nothing is polled."""
        deadline = time.monotonic() + timeout
        with self._changed:  # held between the look and the wait: what changes meanwhile wakes it
            while True:
                try:
                    self.up()
                    return
                except UnavailableError:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise
                self._changed.wait(left)

    def close(self) -> None:
        """Ends the link and joins the thread. Idempotent; in the child of a fork it does nothing."""
        if self._forks != _fork.count():
            return
        self._closing.set()
        link = self.link
        if link is not None:
            link.fail(ClosedError("the client was closed"))
        self._notify()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()


def _unavailable(why: KvtierError) -> UnavailableError:
    """What calls say while there is no attachment, and why."""
    if isinstance(why, UnavailableError):
        return why
    if isinstance(why, NoSpaceError):
        return UnavailableError(
            f"not attached: {why.args[0]}: ask for less (staging_bytes), or raise kvtier serve --ram"
        )
    return UnavailableError(f"not attached: {why}")
