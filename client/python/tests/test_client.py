"""The client against the real daemon, in place and streamed."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
from conftest import LAYOUT, Node, Nodes, chain, content, far, patient, right, write

import kvtier
from kvtier.words import Layout


@pytest.fixture(params=["near", "far"])
def client(request: pytest.FixtureRequest, shared_node: Node):
    with (patient if request.param == "near" else far)(shared_node) as made:
        yield made


def eventually(what: str, ok, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.005)


def changed(**fields: object) -> Layout:
    return Layout(**{**LAYOUT.__dict__, **fields})


def test_write_lookup_fetch(client: kvtier.Client) -> None:
    names = chain(10 + client.streamed, 60)
    ns = client.register(LAYOUT)
    assert set(write(client, ns, names)) == {kvtier.WriteOutcome.COMMITTED}
    assert set(write(client, ns, names)) == {kvtier.WriteOutcome.EXISTS}
    longer = chain(10 + client.streamed, 70)
    prefix = client.lookup(ns, longer)
    assert (prefix.usable_blocks, prefix.usable_tokens, prefix.tiers[0]) == (60, 960, kvtier.Tier.RAM)
    with client.fetch(ns, longer) as lease:
        assert (lease.usable_blocks, lease.usable_tokens, lease.rows) == (60, 960, 60)
        assert lease.shortfalls[0].block == 60
        assert lease.shortfalls[0].reason is kvtier.Reason.NOT_FOUND
        right(lease, longer)
    with client.fetch(ns, longer, parts=0b10) as lease:
        assert np.array_equal(lease.page(3, 1), content(longer[3], 1, 4096))
        with pytest.raises(kvtier.InvalidError):
            lease.page(3, 0)
        with pytest.raises(kvtier.InvalidError):
            lease.page(60, 1)


def test_set_of_blocks(client: kvtier.Client) -> None:
    names = chain(20 + client.streamed, 9)
    ns = client.register(LAYOUT)
    write(client, ns, names)
    asked = [names[5], chain(99, 1)[0], names[3]]
    with client.fetch(ns, asked, mode=kvtier.Mode.SET) as lease:
        assert (lease.usable_blocks, lease.rows) == (2, 3)
        assert lease.page(1, 0) is None
        for row in (0, 2):
            assert np.array_equal(lease.page(row, 1), content(asked[row], 1, 4096))


def test_nothing_stored(client: kvtier.Client) -> None:
    ns = client.register(LAYOUT)
    with client.fetch(ns, chain(77, 3)) as lease:
        assert (lease.id, lease.usable_blocks, lease.rows) == (0, 0, 0)
        assert [(s.block, s.count) for s in lease.shortfalls] == [(0, 3)]


def test_shapes_and_types(client: kvtier.Client) -> None:
    names = chain(30 + client.streamed, 2)
    ns = client.register(LAYOUT)
    write(client, ns, names)
    with client.fetch(ns, names) as lease:
        half = lease.page(0, 0, dtype=np.float16, shape=(2, 2, 16, 128))
        assert half.shape == (2, 2, 16, 128)
        assert half.tobytes() == content(names[0], 0, 16 << 10).tobytes()
        with pytest.raises(ValueError, match="read-only"):
            half[0] = 1
        with pytest.raises(ValueError, match="reshape"):
            lease.page(0, 0, shape=(3, 3))
        del half


def test_other_salt_layout_or_dtype_finds_nothing(client: kvtier.Client) -> None:
    names = chain(40 + client.streamed, 4)
    write(client, client.register(LAYOUT), names)
    for other in (
        client.register(LAYOUT, salt=b"other"),
        client.register(changed(model="test/other")),
        client.register(changed(dtype="fp16")),
        client.register(changed(kv_dtype="fp8")),
        client.register(changed(revision="2")),
        client.register(changed(tensor_parallel=2)),
        client.register(changed(engine_epoch=1)),
        client.register(changed(isa="amx")),
    ):
        assert client.lookup(other, names).usable_blocks == 0, other
        assert client.fetch(other, names).usable_blocks == 0, other


def test_lease_ends_with_the_last_array(shared_node: Node) -> None:
    with patient(shared_node) as client:
        ns = client.register(LAYOUT)
        names = chain(50, 4)
        write(client, ns, names)
        lease = client.fetch(ns, names)
        link = client._keeper.link
        slice_ = lease.page(2, 0)[100:200].view(np.uint16)
        with pytest.raises(kvtier.ViewsInUseError, match="drop every array"):
            lease.release()
        number = lease.id
        del lease
        gc.collect()
        assert number in link.leases, "an array made from it still exists"
        assert np.array_equal(slice_.view(np.uint8), content(names[2], 0, 16 << 10)[100:200])
        del slice_
        assert number not in link.leases, "the last array is gone"
        # The node knows: the blocks can be dropped at once.
        eventually(
            "release", lambda: set(client.drop(ns, names)) <= {kvtier.ItemOutcome.ACCEPTED, kvtier.ItemOutcome.MISSING}
        )


def test_release(shared_node: Node) -> None:
    with patient(shared_node) as client:
        ns = client.register(LAYOUT)
        names = chain(51, 4)
        write(client, ns, names)
        lease = client.fetch(ns, names)
        assert client.drop(ns, names) == [kvtier.ItemOutcome.DEFERRED] * 4
        page = lease.page(0)
        assert np.array_equal(page, content(names[0], 0, page.size)), "a leased page is never evicted"
        del page
        lease.release()
        lease.release()
        with pytest.raises(kvtier.ClosedError):
            lease.page(0)
        eventually("drop", lambda: client.lookup(ns, names).usable_blocks == 0)


def test_prefix_lease_and_first(shared_node: Node) -> None:
    with patient(shared_node) as client:
        ns = client.register(LAYOUT)
        names = chain(52, 20)
        write(client, ns, names)
        with client.fetch(ns, names[:12]) as head, client.fetch(ns, names[12:], prefix=head) as tail:
            assert tail.usable_blocks == 8
            right(tail, names[12:])
        with pytest.raises(kvtier.NotFoundError):
            client.fetch(ns, names[12:], prefix=_Lease(12345))


class _Lease(kvtier.Lease):
    def __init__(self, number: int) -> None:
        super().__init__(parts=0)
        self._number = number

    @property
    def id(self) -> int:
        return self._number


def test_group_fetches_once_and_adopts(shared_node: Node) -> None:
    secret = b"0123456789abcdef"
    layout = changed(
        tensor_parallel=2,
        parts=(kvtier.Part("kv.0", 8192, ranks=(0,)), kvtier.Part("kv.1", 8192, ranks=(1,))),
    )
    names = chain(53, 6)
    with (
        patient(shared_node, group="g", group_secret=secret, staging_bytes=1 << 20) as scheduler,
        patient(shared_node, group="g", group_secret=secret, staging_bytes=1 << 20, ranks=(0,)) as zero,
        patient(shared_node, group="g", group_secret=secret, staging_bytes=1 << 20, ranks=(1,)) as one,
    ):
        ns = scheduler.register(layout)
        for worker in (zero, one):
            worker.register(layout)
            write(worker, ns, names)
        with scheduler.fetch(ns, names, for_group=True) as decision:
            assert decision.usable_blocks == 6
            for rank, worker in enumerate((zero, one)):
                with worker.adopt(ns, decision.adopt_token) as lease:
                    assert lease.parts == 1 << rank
                    for row in range(6):
                        assert np.array_equal(lease.page(row, rank), content(names[row], rank, 8192))
            scheduler.drop_decision(decision.adopt_token)
        with pytest.raises(kvtier.KvtierError, match="secret"):
            patient(shared_node, group="g", group_secret=b"another secret..", staging_bytes=1 << 20).wait_ready(0)


def test_rounds_of_a_small_staging(nodes: Nodes) -> None:
    node = nodes(ram="64MiB")
    with patient(node, staging_bytes=256 << 10) as client:
        ns = client.register(LAYOUT)
        threads = [threading.Thread(target=write, args=(client, ns, chain(i, 100))) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            with client.fetch(ns, chain(i, 100)) as lease:
                assert lease.usable_blocks == 100
                right(lease, chain(i, 100))


def test_reserve_fill_commit_by_rows(client: kvtier.Client) -> None:
    names = chain(60 + client.streamed, 5)
    ns = client.register(LAYOUT)
    with client.reserve(ns, names) as attempt:
        assert attempt.blocks == [0, 1, 2, 3, 4]
        for row in range(5):
            for part in range(2):
                page = attempt.page(row, part)
                page[:] = content(names[row], part, page.size)
        assert attempt.commit([1, 0]) == [kvtier.WriteOutcome.COMMITTED] * 2
        with pytest.raises(kvtier.ClosedError):
            attempt.page(1)
        with pytest.raises(kvtier.ClosedError):
            attempt.commit([1])
        assert attempt.commit([2]) == [kvtier.WriteOutcome.COMMITTED]
    attempt.abort()
    with pytest.raises(kvtier.ClosedError):
        attempt.commit()
    with client.fetch(ns, names) as lease:
        assert lease.usable_blocks == 3, "what was not committed is not there"
        right(lease, names)
    again = client.reserve(ns, names)
    assert again.outcomes == [kvtier.WriteOutcome.EXISTS] * 3 + [kvtier.WriteOutcome.GRANTED] * 2
    again.abort()


def test_a_fill_that_fails_aborts(client: kvtier.Client) -> None:
    ns = client.register(LAYOUT)

    def fill(block: int, part: int, page: np.ndarray) -> None:
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="engine's own"):
        client.write(ns, chain(62 + client.streamed, 2), fill)
    assert not client._keeper.link.attempts
    write(client, ns, chain(62 + client.streamed, 2))


def test_prefetch_and_retention(nodes: Nodes) -> None:
    node = nodes(nvme="128MiB")
    with patient(node) as client:
        ns = client.register(LAYOUT)
        names = chain(1, 8)
        write(client, ns, names)
        accepted = [kvtier.ItemOutcome.ACCEPTED]
        assert client.retain(ns, names, kvtier.Retention(80, ttl=60, refresh_on_hit=True)) == accepted * 8
        assert client.pin(ns, names[:2], 60) == accepted * 2
        assert client.pin(ns, names[:2], 0) == accepted * 2
        assert client.retain(ns, chain(7, 2), kvtier.Retention(1)) == [kvtier.ItemOutcome.MISSING] * 2
        with pytest.raises(kvtier.InvalidError):
            client.retain(ns, names, kvtier.Retention(101))
        client.demote(ns, names)
        eventually("demotion", lambda: set(client.lookup(ns, names).tiers) == {kvtier.Tier.NVME})
        ticket = client.prefetch(ns, names, priority=50)
        assert sorted(ticket) == list(range(8))
        assert ticket.wait(5) is kvtier.Reason.NONE
        ticket.cancel()
        assert client.prefetch(ns, names).id == 0, "all is there"
        with client.fetch(ns, names) as lease:
            assert set(lease.tiers) == {kvtier.Tier.RAM}
            right(lease, names)


def test_bad_input(shared_node: Node) -> None:
    with patient(shared_node) as client:
        ns = client.register(LAYOUT)
        for wrong in ([], [b"short"], chain(1, 65537)):
            with pytest.raises(kvtier.InvalidError):
                client.fetch(ns, wrong)
        with pytest.raises(kvtier.UnknownNamespaceError, match="register"):
            client.fetch(kvtier.Namespace(bytes(32), LAYOUT), chain(1, 1))
        with pytest.raises(kvtier.BadLayoutError, match="block_tokens"):
            client.register(changed(block_tokens=0))
        with pytest.raises(kvtier.BadLayoutError, match="attention"):
            client.register(changed(attention="magic"))
        with pytest.raises(kvtier.InvalidError):
            client.prefetch(ns, chain(1, 1), priority=101)
        with pytest.raises(kvtier.InvalidError):
            client.fetch(ns, chain(1, 1), timeout=-1)
    with pytest.raises(kvtier.ClosedError):
        client.fetch(ns, chain(1, 1))
    client.close()
    with far(shared_node) as remote, pytest.raises(kvtier.InvalidError, match="socket="):
        remote.prefetch(remote.register(LAYOUT), chain(1, 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"socket": "/x", "address": "h:1"},
        {"address": "h:1", "token": "secret"},
        {"socket": "/x", "group": "g"},
        {"socket": "/x", "group": "g", "group_secret": b"short"},
        {"socket": "/x", "call_timeout": 0},
        {"socket": "/x", "staging_bytes": -1},
    ],
)
def test_bad_settings(settings: dict) -> None:
    with pytest.raises(kvtier.InvalidError):
        kvtier.Client(**settings)


def test_streamed_fetch_is_cut_to_its_budget(shared_node: Node) -> None:
    with far(shared_node, private_bytes=100 << 10) as client:
        ns = client.register(LAYOUT)
        names = chain(80, 10)
        write(client, ns, names)
        lease = client.fetch(ns, names)
        assert lease.usable_blocks == 5
        assert lease.shortfalls[-1].reason is kvtier.Reason.NO_SPACE
        right(lease, names)
        page = lease.page(4)
        lease.release()
        del lease
        assert client.private.used > 0
        assert np.array_equal(page, content(names[4], 0, page.size)), "a private copy outlives its lease"
        del page
        eventually("budget", lambda: client.private.used == 0)
