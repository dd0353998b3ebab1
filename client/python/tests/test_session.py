"""Sessions over two real nodes."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import LAYOUT, Nodes, chain, patient, right, write

import kvtier

CLUSTER = {"peer_listen": "127.0.0.1:0", "gossip_listen": "127.0.0.1:0", "listen": "127.0.0.1:0", "nvme": "64MiB"}


def eventually(what: str, ok, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not ok():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)


def test_a_session_moves_under_its_engine(nodes: Nodes) -> None:
    first = nodes(name="first", bootstrap="true", **CLUSTER)
    second = nodes(name="second", join=first.peers, **CLUSTER)
    names = chain(1, 40)
    with patient(first) as here, patient(second) as there:
        ns = here.register(LAYOUT)
        there.register(LAYOUT)
        write(here, ns, names[:30])
        with kvtier.Session(here, "s", ns, retention=kvtier.Retention(50)) as session:
            session.append(0, names[:20])
            session.append(10, names[10:30])
            session.wait(10)
            assert (session.blocks, session.info.epoch, session.info.owner_name) == (30, 1, "first")
            with pytest.raises(kvtier.InvalidError):
                session.append(31, names[31:])

            events: list[kvtier.SessionEvent] = []
            watcher = threading.Thread(
                target=lambda: [
                    events.append(e) for e in iter_until(kvtier.watch(here, ["s"]), lambda e: e.epoch == 2 or e.gone)
                ]
            )
            watcher.start()

            def moved() -> bool:
                try:  # the second node is in the directory some time after its start
                    return list(kvtier.migrate(here, "s", "second"))[-1].state == "done"
                except kvtier.NotFoundError:
                    return False

            eventually("it moves", moved)
            watcher.join(20)
            assert events[-1].owner_address == second.address
            write(here, ns, names[30:35], first=30)
            session.append(30, names[30:35])
            with pytest.raises(kvtier.MovedError):
                session.wait(10)
            assert session.rest() == (30, names[30:35])
            with pytest.raises(kvtier.MovedError):
                kvtier.Session(here, "s", ns)
        with kvtier.Session(there, "s", ns) as session:
            first_block, rest = 30, names[30:35]
            session.append(first_block, rest)
            session.wait(10)
            assert (session.blocks, session.info.epoch) == (35, 2)
        with there.fetch(ns, names[:30]) as lease:  # nothing has to be brought any more
            assert lease.usable_blocks == 30
            right(lease, names)
        with kvtier.Session(here, "s", ns, bring=True) as session:
            assert session.info.epoch == 3
        kvtier.close_session(there, "s")


def iter_until(events, stop):
    for e in events:
        yield e
        if stop(e):
            return


def test_appends_wait_for_a_node_that_restarts(nodes: Nodes) -> None:
    node = nodes(name="only", bootstrap="true", **CLUSTER)
    names = chain(2, 20)
    with patient(node) as client:
        ns = client.register(LAYOUT)
        with kvtier.Session(client, "s", ns) as session:
            session.append(0, names[:10])
            session.wait(10)
            node.kill()
            session.append(10, names[10:])  # returns at once
            assert session.blocks == 10
            with pytest.raises(kvtier.ExpiredError):
                session.wait(0.2)
            node.start()
            session.wait(60)
            assert session.blocks == 20
        with pytest.raises(kvtier.ClosedError):
            session.append(20, names)


def test_a_node_of_no_cluster_says_so(nodes: Nodes) -> None:
    with patient(nodes()) as client, pytest.raises(kvtier.IncompatibleError, match="--bootstrap"):
        kvtier.Session(client, "s", client.register(LAYOUT))
