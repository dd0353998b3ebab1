"""The calls of a client that say how long blocks are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvtier._link import Link, Times
from kvtier.errors import InvalidError
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import ItemOutcome, Namespace, Retention, Tier, item_outcomes, pack, span


class Retaining(ABC):
    """One outcome a block. A part of Client, which has the link."""

    times: Times

    @abstractmethod
    def _up(self) -> Link: ...

    def retain(self, ns: Namespace, names: Sequence[bytes], retention: Retention) -> list[ItemOutcome]:
        """Sets the retention of blocks."""
        link = self._up()
        request = pb.RetainRequest(namespace_id=ns.id, block_names=pack(names), retention=retention.to_wire())
        return self._each(link.unary(link.methods.retain, request, "retain", self.times.call), names)

    def demote(self, ns: Namespace, names: Sequence[bytes], leave: Tier = Tier.NONE) -> list[ItemOutcome]:
        """Moves blocks out of a tier (NONE: RAM) once they are in a slower one."""
        link = self._up()
        request = pb.DemoteRequest(namespace_id=ns.id, block_names=pack(names))
        setattr(request, "from", int(leave))
        return self._each(link.unary(link.methods.demote, request, "demote", self.times.call), names)

    def drop(self, ns: Namespace, names: Sequence[bytes]) -> list[ItemOutcome]:
        """Forgets blocks in every tier; DEFERRED where a lease still holds one."""
        link = self._up()
        request = pb.DropRequest(namespace_id=ns.id, block_names=pack(names))
        return self._each(link.unary(link.methods.drop, request, "drop", self.times.call), names)

    def pin(self, ns: Namespace, names: Sequence[bytes], ttl: float) -> list[ItemOutcome]:
        """Keeps blocks in RAM for ttl seconds (0: unpin), at most 24 h and a quarter of tier and quota."""
        link = self._up()
        request = pb.PinRequest(namespace_id=ns.id, block_names=pack(names), ttl=span(ttl))
        return self._each(link.unary(link.methods.pin, request, "pin", self.times.call), names)

    @staticmethod
    def _each(
        answer: pb.RetainResponse | pb.DemoteResponse | pb.DropResponse | pb.PinResponse, names: Sequence[bytes]
    ) -> list[ItemOutcome]:
        if len(answer.outcomes) != len(names):
            raise InvalidError(f"{len(answer.outcomes)} outcomes for {len(names)} blocks")
        return item_outcomes(answer.outcomes)
