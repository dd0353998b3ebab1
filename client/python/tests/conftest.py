"""A real daemon for the tests: each is stopped with the test that started it, and none outlives pytest."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvtier

ROOT = Path(__file__).resolve().parents[3]
BINARY = Path(os.environ.get("KVTIER_BINARY", ROOT / "bin" / "kvtier"))


class Node:
    """One daemon in a directory of its own, which outlives a restart."""

    def __init__(self, directory: Path, **flags: str) -> None:
        self.directory = directory
        self.socket = str(directory / "k.sock")
        self.address = ""
        self.peers = ""
        self.flags = {
            "dir": str(directory / "data"),
            "socket": self.socket,
            "http-listen": "off",
            "ram": "256MiB",
            "nvme": "0",
            "log-level": "warn",
        } | {k.replace("_", "-"): v for k, v in flags.items()}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        assert self._process is None
        args = [str(BINARY), "serve", *(f"--{k}={v}" for k, v in self.flags.items())]
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}  # settings of the daemon
        with open(self.directory / "log", "a") as log:
            self._process = subprocess.Popen(
                args, stdout=subprocess.PIPE, stderr=log, text=True, env=env, start_new_session=True
            )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 30)
        line = self._process.stdout.readline() if ready else ""
        if not line.startswith("ready"):
            self.kill()
            raise AssertionError(f"the daemon did not start: {line!r} {(self.directory / 'log').read_text()}")
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        self.address = said.get("listen", "off")
        self.peers = said.get("peers", "")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def freeze(self) -> None:
        """Stops every thread of the daemon, as a hung machine would, and waits until they stand."""
        os.kill(self.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        deadline = time.monotonic() + 10
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)


class Nodes:
    """Makes daemons and stops them all."""

    def __init__(self) -> None:
        self._made: list[Node] = []

    def __call__(self, **flags: str) -> Node:
        # A socket's path is short: not pytest's own directory.
        node = Node(Path(tempfile.mkdtemp(prefix="kvt")), **flags)
        self._made.append(node)
        node.start()
        return node

    def close(self) -> None:
        for node in self._made:
            node.kill()
            shutil.rmtree(node.directory, ignore_errors=True)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_node() -> Iterator[Node]:
    """A node for tests that leave nothing behind but blocks under names of their own."""
    made = Nodes()
    yield made(listen="127.0.0.1:0", nvme="256MiB")
    made.close()


LAYOUT = kvtier.Layout(
    model="test/model",
    dtype="bf16",
    kv_dtype="bf16",
    attention="gqa",
    layers=2,
    kv_heads=2,
    head_dim=64,
    engine_layout="test/LBNHC",
    hash_algorithm="test/counter",
    block_tokens=16,
    parts=(kvtier.Part("kv", 16 << 10), kvtier.Part("index", 4096)),
)


def patient(node: Node, **more: object) -> kvtier.Client:
    """A client whose breaker does not take a loaded machine for a silent node."""
    settings: dict[str, object] = {"stall_timeout": 3.0, "call_timeout": 20.0, **more}
    return kvtier.Client(node.socket, **settings)  # type: ignore[arg-type]


def far(node: Node, **more: object) -> kvtier.Client:
    settings: dict[str, object] = {"stall_timeout": 3.0, "call_timeout": 20.0, **more}
    return kvtier.Client(address=node.address, **settings)  # type: ignore[arg-type]


def chain(number: int, blocks: int) -> list[bytes]:
    """The names of the blocks of the chain with this number."""
    return [number.to_bytes(8, "little") + i.to_bytes(8, "little") + bytes(16) for i in range(blocks)]


def content(name: bytes, part: int, size: int) -> np.ndarray:
    """What the page of a block and part must hold."""
    seed = int.from_bytes(name[:8], "little") * 1_000_003 + int.from_bytes(name[8:16], "little") * 97 + part
    words = np.arange(-(-size // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 7919 + 1)
    return words.view(np.uint8)[:size]


def write(client: kvtier.Client, ns: kvtier.Namespace, names: list[bytes], **more: object) -> list[kvtier.WriteOutcome]:
    def fill(block: int, part: int, page: np.ndarray) -> None:
        page[:] = content(names[block], part, page.size)

    outcomes = client.write(ns, names, fill, **more)  # type: ignore[arg-type]
    assert all(o.stored for o in outcomes), outcomes
    return outcomes


def right(lease: kvtier.Lease, names: list[bytes], parts: int = 2) -> None:
    """Every page of the lease is the right one."""
    for row in range(lease.rows):
        for part in range(parts):
            page = lease.page(row, part)
            assert page is not None, (row, part)
            assert np.array_equal(page, content(names[row], part, page.size)), (row, part)
