"""The breaker's decision, apart from its effects."""

from __future__ import annotations

import enum

STALL_TICKS = 5  # punctual ticks without a sign of life until the breaker opens
PING_TICKS = 2  # until the node is asked for one


class Verdict(enum.Enum):
    CALM = "calm"
    PING = "ping"
    TRIP = "trip"
    MEND = "mend"


class Stall:
    """Told once an interval, while calls are in flight or the breaker is open, what was heard so far.

    A tick that comes late proves nothing: this process was not scheduled, or another thread held the
    interpreter, and the node on the same machine may not have run either. Only punctual ticks count.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.open = False
        self._last: float | None = None
        self._heard = 0
        self._quiet = 0

    def tick(self, now: float, asked: int, heard: int) -> Verdict:
        if self._last is not None and now - self._last < self.interval * 0.75:
            return Verdict.CALM  # woken for something else
        punctual = self._last is not None and now - self._last < 2 * self.interval
        self._last = now
        if heard != self._heard:
            self._heard, self._quiet = heard, 0
            if self.open:
                self.open = False
                return Verdict.MEND
            return Verdict.CALM
        if self.open:
            return Verdict.CALM
        if not asked:
            self._quiet = 0
            return Verdict.CALM
        if not punctual:
            return Verdict.CALM
        self._quiet += 1
        if self._quiet == STALL_TICKS:
            self.open = True
            return Verdict.TRIP
        return Verdict.PING if self._quiet == PING_TICKS else Verdict.CALM

    def pause(self) -> None:
        """No ticks come until the next call: the gap is no lateness."""
        self._last, self._quiet = None, 0
