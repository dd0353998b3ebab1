"""Random operations on a real node beside a model that is a dictionary."""

from __future__ import annotations

import gc

import numpy as np
from conftest import LAYOUT, Nodes, chain, content, far, patient, write
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import kvtier

CHAINS, BLOCKS = 4, 12


class Machine(RuleBasedStateMachine):
    """Committed blocks are found with their bytes, others never, whatever was aborted, leased or dropped between."""

    nodes: Nodes
    near: kvtier.Client
    remote: kvtier.Client
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        Machine.runs += 1
        self.salt = Machine.runs.to_bytes(4, "little")  # each run is alone in namespaces of its own
        self.ns = {client: client.register(LAYOUT, self.salt) for client in (self.near, self.remote)}
        self.stored: set[tuple[int, int]] = set()
        self.leases: list[tuple[kvtier.Lease, list[bytes]]] = []
        self.arrays: list[tuple[np.ndarray, bytes]] = []

    def client(self, streamed: bool) -> kvtier.Client:
        return self.remote if streamed else self.near

    def prefix(self, number: int, most: int) -> int:
        return next((i for i in range(most) if (number, i) not in self.stored), most)

    @rule(number=st.integers(0, CHAINS - 1), blocks=st.integers(1, BLOCKS), streamed=st.booleans())
    def write(self, number: int, blocks: int, streamed: bool) -> None:
        client = self.client(streamed)
        write(client, self.ns[client], chain(number, blocks))
        self.stored |= {(number, i) for i in range(blocks)}

    @rule(number=st.integers(0, CHAINS - 1), blocks=st.integers(1, BLOCKS), rows=st.sets(st.integers(0, BLOCKS - 1)))
    def reserve_fill_some_and_abort(self, number: int, blocks: int, rows: set[int]) -> None:
        names = chain(number, blocks)
        with self.near.reserve(self.ns[self.near], names) as attempt:
            mine = [row for row in sorted(rows) if row < attempt.rows]
            for row in mine:
                for part in range(2):
                    page = attempt.page(row, part)
                    page[:] = content(names[attempt.blocks[row]], part, page.size)
            if mine:
                assert set(attempt.commit(mine)) == {kvtier.WriteOutcome.COMMITTED}
            self.stored |= {(number, attempt.blocks[row]) for row in mine}

    @rule(number=st.integers(0, CHAINS - 1), blocks=st.integers(1, BLOCKS), streamed=st.booleans())
    def fetch(self, number: int, blocks: int, streamed: bool) -> None:
        client, names = self.client(streamed), chain(number, blocks)
        lease = client.fetch(self.ns[client], names)
        assert lease.usable_blocks == self.prefix(number, blocks)
        self.leases.append((lease, names))

    @rule(number=st.integers(0, CHAINS - 1), streamed=st.booleans())
    def lookup(self, number: int, streamed: bool) -> None:
        client = self.client(streamed)
        found = client.lookup(self.ns[client], chain(number, BLOCKS))
        assert found.usable_blocks == self.prefix(number, BLOCKS)
        assert {i for i, tier in enumerate(found.tiers) if tier} == {i for n, i in self.stored if n == number}

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def view(self, data: st.DataObject) -> None:
        lease, names = data.draw(st.sampled_from(self.leases))
        if lease.rows:
            row = data.draw(st.integers(0, lease.rows - 1))
            self.arrays.append((lease.page(row)[8:-8], names[row]))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), wait=st.booleans())
    def release(self, data: st.DataObject, wait: bool) -> None:
        at = data.draw(st.integers(0, len(self.leases) - 1))
        lease, names = self.leases.pop(at)
        try:
            lease.release(wait)
        except kvtier.ViewsInUseError:
            assert any(name in names for _, name in self.arrays)

    @precondition(lambda self: self.arrays)
    @rule(data=st.data())
    def forget_view(self, data: st.DataObject) -> None:
        del self.arrays[data.draw(st.integers(0, len(self.arrays) - 1))]

    @precondition(lambda self: not self.leases and not self.arrays)
    @rule(number=st.integers(0, CHAINS - 1), blocks=st.sets(st.integers(0, BLOCKS - 1), min_size=1))
    def drop(self, number: int, blocks: set[int]) -> None:
        names = chain(number, BLOCKS)
        self.near.renew()  # one-way releases before it have been taken
        self.near.drop(self.ns[self.near], [names[i] for i in sorted(blocks)])
        self.stored -= {(number, i) for i in blocks}

    @invariant()
    def every_view_shows_its_page(self) -> None:
        for array, name in self.arrays:
            assert np.array_equal(array, content(name, 0, 16 << 10)[8:-8])

    def teardown(self) -> None:
        self.arrays.clear()
        self.leases.clear()
        gc.collect()
        assert not self.near._keeper.link.leases, "a lease outlived its arrays"
        assert not self.near._keeper.link.attempts
        assert self.remote.private.used == 0


def test_random_operations(nodes: Nodes) -> None:
    node = nodes(listen="127.0.0.1:0", ram="256MiB")
    with patient(node) as near, far(node) as remote:
        Machine.near, Machine.remote = near, remote
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
