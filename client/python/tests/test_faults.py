"""What happens when the node, the process or the caller misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import LAYOUT, Node, Nodes, chain, content, far, patient, right, write
from test_client import eventually

import kvtier
from kvtier import check
from kvtier.aio import AsyncClient


def test_restart_serves_from_nvme_and_old_views_stay(nodes: Nodes) -> None:
    node = nodes(nvme="128MiB")
    names = chain(1, 20)
    with patient(node) as client:
        ns = client.register(LAYOUT)
        write(client, ns, names, durable=True)
        lease = client.fetch(ns, names)
        page = lease.page(3)
        attempt = client.reserve(ns, chain(2, 1))
        node.stop()
        eventually("loss", lambda: not client.attached)
        began = time.monotonic()
        with pytest.raises(kvtier.UnavailableError):
            client.fetch(ns, names)
        assert time.monotonic() - began < 0.05, "a node that is gone costs nothing"
        assert np.array_equal(page, content(names[3], 0, page.size)), "a view outlives its daemon"
        with pytest.raises(kvtier.UnavailableError):
            lease.page(4)
        with pytest.raises(kvtier.UnavailableError, match="reserve again"):
            attempt.commit()
        attempt.abort()
        node.start()
        client.wait_ready(5)
        with client.fetch(ns, names, timeout=5) as again:
            assert again.usable_blocks == 20
            assert set(again.tiers) == {kvtier.Tier.NVME}
            right(again, names)
        assert np.array_equal(page, content(names[3], 0, page.size))
        del page
        lease.release()


def test_killed_node_is_a_miss_and_comes_back(nodes: Nodes) -> None:
    node = nodes(nvme="128MiB")
    names = chain(1, 10)
    with patient(node) as client, kvtier.Client(node.socket, stall_timeout=0.2) as other:
        ns = client.register(LAYOUT)
        write(client, ns, names, durable=True)
        node.kill()
        for each in (client, other):
            eventually("loss", lambda each=each: not each.attached)
            with pytest.raises(kvtier.UnavailableError):
                each.lookup(ns, names)
        node.start()
        began = time.monotonic()
        for each in (client, other):
            each.wait_ready(5)
            assert each.fetch(ns, names, timeout=5).usable_blocks == 10
        assert time.monotonic() - began < 5


def test_breaker(nodes: Nodes) -> None:
    node = nodes(listen="127.0.0.1:0")
    names = chain(1, 4)
    for streamed in (False, True):
        target = {"address": node.address} if streamed else {"socket": node.socket}
        with kvtier.Client(**target, stall_timeout=0.1, call_timeout=20) as client:
            client.wait_ready(5)
            ns = client.register(LAYOUT)
            write(client, ns, names)
            node.freeze()
            try:
                began = time.monotonic()
                with pytest.raises(kvtier.UnavailableError):
                    client.lookup(ns, names)
                assert time.monotonic() - began < 2, "a hung node holds up a call for the stall time, not its deadline"
                began = time.monotonic()
                for _ in range(100):
                    with pytest.raises(kvtier.UnavailableError):
                        client.fetch(ns, names)
                assert time.monotonic() - began < 0.5, "with the breaker open calls cost nothing"
            finally:
                node.thaw()
            eventually("mend", lambda client=client: client.attached)
            with client.fetch(ns, names) as lease:
                right(lease, names)


def test_overdue_lease_is_renewed_and_then_revoked(nodes: Nodes) -> None:
    node = nodes()
    names = chain(1, 4)
    with patient(node) as client, patient(node, max_hold=0.1) as careless:
        for each in (client, careless):
            ns = each.register(LAYOUT)
        write(client, ns, names)
        held = client.fetch(ns, names, ttl=0.4)
        doomed = careless.fetch(ns, names, ttl=0.4)
        page = doomed.page(0)
        eventually("revocation", lambda: doomed.ended is not None)
        assert isinstance(doomed.ended, kvtier.ExpiredError)
        with pytest.raises(kvtier.ExpiredError, match="fetch again"):
            doomed.page(1)
        assert np.array_equal(page, content(names[0], 0, page.size)), "a view is never taken away"
        doomed.check()
        assert held.ended is None, "a lease that is held is renewed by itself"
        del page
        with held:
            right(held, names)


def test_reused_slot_is_lost(shared_node: Node) -> None:
    with patient(shared_node) as client:
        ns = client.register(LAYOUT)
        names = chain(300, 2)
        write(client, ns, names)
        lease = client.fetch(ns, names)
        # What a reader sees whose slot was reused: another generation than its reference names.
        lease._slots = lease._slots.copy()
        lease._slots["generation"][1] += np.uint64(1)
        with pytest.raises(kvtier.LostError, match="recompute"):
            lease.check()
        with pytest.raises(kvtier.LostError):
            lease.release()


CHILD = """
import os, sys, time, kvtier
sys.path.insert(0, {tests!r})
from conftest import LAYOUT, chain
client = kvtier.Client({socket!r}, stall_timeout=3)
ns = client.register(LAYOUT)
lease = client.fetch(ns, chain(310, 4))
page = lease.page(0)
pid = os.fork()
if pid == 0:
    began = time.monotonic()
    for call in (lambda: client.fetch(ns, chain(310, 4)), lambda: client.lookup(ns, chain(310, 4))):
        try:
            call()
            os._exit(3)
        except kvtier.ForkedError as e:
            if "after the fork" not in str(e):
                os._exit(4)
    total = int(page.sum())  # what was mapped before the fork stays readable
    del lease, page
    client.close()
    with kvtier.Client({socket!r}, stall_timeout=3) as own:
        if own.fetch(own.register(LAYOUT), chain(310, 4)).usable_blocks != 4:
            os._exit(5)
    if time.monotonic() - began > 5:
        os._exit(6)
    sys.exit(0)  # and the interpreter of the child goes down in an orderly way
_, status = os.waitpid(pid, 0)
assert status == 0, status
assert client.fetch(ns, chain(310, 4)).usable_blocks == 4, "the parent goes on"
del page
lease.release()
"""


def test_fork(shared_node: Node) -> None:
    with patient(shared_node) as client:
        write(client, client.register(LAYOUT), chain(310, 4))
    script = CHILD.format(tests=str(Path(__file__).parent), socket=shared_node.socket)
    subprocess.run([sys.executable, "-W", "error::ResourceWarning", "-c", script], check=True, timeout=30)


def spawned(socket: str, queue: multiprocessing.Queue) -> None:
    with kvtier.Client(socket, stall_timeout=3) as client:
        queue.put(client.lookup(client.register(LAYOUT), chain(310, 4)).usable_blocks)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing(shared_node: Node, method: str) -> None:
    with patient(shared_node) as client:
        write(client, client.register(LAYOUT), chain(310, 4))
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=spawned, args=(shared_node.socket, queue))
        process.start()
        assert queue.get(timeout=30) == 4
        process.join(30)
        assert process.exitcode == 0


def test_exit_without_close(shared_node: Node) -> None:
    script = (
        f"import kvtier; c = kvtier.Client({shared_node.socket!r}, stall_timeout=3); "
        "l = c.fetch(kvtier.Namespace(bytes(32), None), [bytes(32)]) if False else None; print(c.attached)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_killed_process_leaves_no_lease(nodes: Nodes) -> None:
    node = nodes()
    with patient(node) as client:
        ns = client.register(LAYOUT)
        write(client, ns, chain(310, 4))
        script = (
            f"import sys, os, signal; sys.path.insert(0, {str(Path(__file__).parent)!r}); import kvtier\n"
            "from conftest import LAYOUT, chain\n"
            f"c = kvtier.Client({node.socket!r}, stall_timeout=3)\n"
            "l = c.fetch(c.register(LAYOUT), chain(310, 4)); p = l.page(0); print(l.id, flush=True)\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
        assert done.returncode == -signal.SIGKILL
        assert int(done.stdout) > 0
        client.drop(ns, chain(310, 4))
        eventually("the dead process's lease", lambda: client.lookup(ns, chain(310, 4)).usable_blocks == 0)


def test_no_node(tmp_path: Path) -> None:
    with kvtier.Client(str(tmp_path / "none.sock")) as client:
        assert not client.attached
        with pytest.raises(kvtier.UnavailableError, match="kvtier serve"):
            client.lookup(kvtier.Namespace(bytes(32), LAYOUT), chain(1, 1))
        with pytest.raises(kvtier.UnavailableError):
            client.wait_ready(0.05)


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_socket_of_others(nodes: Nodes) -> None:
    node = nodes()
    os.chmod(node.directory, 0o755)
    assert stat.S_IMODE(os.stat(node.socket).st_mode) == 0o660
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgid(65534)
            os.setgroups([])
            os.setuid(65534)
            try:
                kvtier.Client(node.socket)
            except kvtier.DeniedError as e:
                code = 0 if "group" in str(e) else 2
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_tenants_are_apart(tmp_path: Path, nodes: Nodes) -> None:
    secrets = {"a": "a" * 40, "b": "b" * 40}
    config = tmp_path / "config.yaml"
    lines = [f"  - name: {name}\n    tokens: [{{secret: {secret}}}]" for name, secret in secrets.items()]
    config.write_text("\n".join(["tenants:", *lines, ""]))
    node = nodes(config=str(config))
    names = chain(1, 4)
    small = {"staging_bytes": 1 << 20}
    with patient(node, token=secrets["a"], **small) as a, patient(node, token=secrets["b"], **small) as b:
        assert (a.tenant, b.tenant) == ("a", "b")
        mine, other = a.register(LAYOUT), b.register(LAYOUT)
        assert mine.id != other.id
        write(a, mine, names)
        assert a.lookup(mine, names).usable_blocks == 4
        assert b.lookup(other, names).usable_blocks == 0
        with pytest.raises(kvtier.UnknownNamespaceError):
            b.fetch(mine, names)
    with pytest.raises(kvtier.DeniedError):
        patient(node, token="wrong-token-wrong-token-wrong-token")


def test_something_else_listens(tmp_path: Path) -> None:
    import socket

    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(8)
        with kvtier.Client(path, dial_timeout=0.3) as client:
            assert not client.attached, "a socket that does not answer is an absent node"


def test_async_client(shared_node: Node) -> None:
    names = chain(400, 12)

    def fill(block: int, part: int, page: np.ndarray) -> None:
        page[:] = content(names[block], part, page.size)

    async def run() -> None:
        async with await AsyncClient.open(shared_node.socket, stall_timeout=3) as client:
            await client.wait_ready(5)
            ns = await client.register(LAYOUT)
            assert all(o.stored for o in await client.write(ns, names, fill))
            leases = await asyncio.gather(*(client.fetch(ns, names) for _ in range(20)))
            for lease in leases:
                right(lease, names)
                await client.release(lease)
            cancelled = asyncio.ensure_future(client.fetch(ns, names))
            await asyncio.sleep(0)
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await cancelled).release()
            for _ in range(500):
                if not client.client._keeper.link.leases:
                    break
                await asyncio.sleep(0.01)
            assert not client.client._keeper.link.leases, "what a cancelled call was granted is given back"
            await client.demote(ns, names)
            ticket = await client.prefetch(ns, names)
            assert await client.wait(ticket, 5) is kvtier.Reason.NONE
            assert len([block async for block in client.ready(ticket)]) == ticket.admitted

    asyncio.run(run())


def test_check(shared_node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--socket", shared_node.socket]) == 0
    assert "fetch" in capsys.readouterr().out
    assert check.main(["--address", shared_node.address]) == 0
    capsys.readouterr()
    assert check.main(["--socket", str(tmp_path / "none")]) == 1
    assert "kvtier serve" in capsys.readouterr().out


def test_streamed_client_notices_the_end(nodes: Nodes) -> None:
    node = nodes(listen="127.0.0.1:0")
    with far(node) as client:
        ns = client.register(LAYOUT)
        write(client, ns, chain(1, 3))
        node.kill()
        eventually("loss", lambda: not client.attached)
        with pytest.raises(kvtier.UnavailableError):
            client.fetch(ns, chain(1, 3))


def test_no_descriptor_is_left(nodes: Nodes) -> None:
    node = nodes()
    before = len(os.listdir("/proc/self/fd"))
    for i in range(5):
        with patient(node) as client:
            ns = client.register(LAYOUT)
            write(client, ns, chain(i, 4))
            with client.fetch(ns, chain(i, 4)) as lease:
                right(lease, chain(i, 4))
    del client, lease, ns
    eventually("descriptors", lambda: len(os.listdir("/proc/self/fd")) <= before + 1)


def test_a_reserve_that_was_given_up_holds_nothing(nodes: Nodes) -> None:
    node = nodes()
    with kvtier.Client(node.socket, stall_timeout=0.1, staging_bytes=256 << 10) as client:
        ns = client.register(LAYOUT)
        node.freeze()
        try:
            with pytest.raises(kvtier.UnavailableError):
                client.reserve(ns, chain(1, 8))
        finally:
            node.thaw()
        eventually("mend", lambda: client.attached)

        def granted() -> bool:
            with client.reserve(ns, chain(1, 8)) as attempt:
                return attempt.rows == 8

        eventually("room", granted)


def test_waiting_for_a_node_is_woken_and_polls_nothing(nodes: Nodes) -> None:
    """What is waited for is told: a wake-up that is missed would last until the timeout."""
    node = nodes()

    def waits(client: kvtier.Client) -> threading.Thread:
        errors.clear()

        def wait() -> None:
            try:
                client.wait_ready(120)
            except kvtier.KvtierError as e:
                errors.append(e)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    errors: list[kvtier.KvtierError] = []
    with kvtier.Client(node.socket, stall_timeout=0.1) as client:
        ns = client.register(LAYOUT)
        node.freeze()
        with pytest.raises(kvtier.UnavailableError):
            client.fetch(ns, chain(1, 1))
        thread = waits(client)
        node.thaw()
        thread.join(60)
        assert not thread.is_alive(), "a node that is heard again"
        assert not errors
        node.kill()
        eventually("loss", lambda: not client.attached)
        thread = waits(client)
        node.start()
        thread.join(60)
        assert not thread.is_alive(), "a node that is back"
        assert not errors
        node.kill()
        eventually("loss", lambda: not client.attached)
        thread = waits(client)
        client.close()
        thread.join(60)
        assert not thread.is_alive(), "a client that was closed"
        assert [type(e) for e in errors] == [kvtier.ClosedError]
