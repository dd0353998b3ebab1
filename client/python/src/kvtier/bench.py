"""python -m kvtier.bench: each path of the client beside its bound, in one run on one node.

Times are of this machine at this moment; what is to be read are the ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import xxhash

from kvtier._memory import Bytes
from kvtier._rpc import Methods, Target
from kvtier.client import Client
from kvtier.v1 import pages_pb2 as pb
from kvtier.words import Layout, Namespace, Part

_PAGES = 64
_CHUNK = 64 << 10


@contextmanager
def _own_node(binary: str) -> Iterator[str]:
    """A node for the time of the bench, with a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvt") as directory:
        socket = str(Path(directory) / "k.sock")
        args = [
            binary,
            "serve",
            f"--socket={socket}",
            "--nvme=0",
            "--ram=2GiB",
            "--http-listen=off",
            "--log-level=error",
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            try:
                if not process.stdout.readline().startswith("ready"):
                    sys.exit(f"{binary} serve did not start")
                yield socket
            finally:
                process.terminate()
                process.wait(60)


def _layout(page_bytes: int) -> Layout:
    return Layout(
        model="kvtier/bench",
        kv_dtype="uint8",
        attention="mha",
        layers=1,
        engine_layout="kvtier/bench",
        hash_algorithm="kvtier/random",
        block_tokens=16,
        parts=(Part("kv", page_bytes),),
    )


def _percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)]


def _pair(a: Callable[[], object], b: Callable[[], object], rounds: int) -> tuple[list[float], list[float]]:
    """Times of two things, in turns, so that a machine that gets slower slows both."""
    out: tuple[list[float], list[float]] = ([], [])
    for i in range(-rounds // 10, rounds):
        for times, do in zip(out, (a, b), strict=True):
            began = time.perf_counter()
            do()
            if i >= 0:
                times.append(time.perf_counter() - began)
    return out


def fetch(client: Client, ns: Namespace, names: Sequence[bytes], rounds: int) -> None:
    """Fetch and release of resident pages beside an empty unary call of grpcio on the same socket."""
    channel = Target(socket=client.socket).channel()
    methods = Methods(channel)
    attachment = client.attachment

    def empty() -> None:
        methods.renew(pb.RenewRequest(attachment=attachment))  # type: ignore[operator]

    def get() -> None:
        lease = client.fetch(ns, names)
        assert lease.usable_blocks == len(names)
        lease.release(wait=False)

    calls, fetches = _pair(empty, get, rounds)
    channel.close()
    bound, have = statistics.median(calls), statistics.median(fetches)
    _say(
        "fetch of 64 local pages, p50",
        f"{have * 1e6:.0f} us",
        f"{have / bound:.2f} x",
        "an empty grpcio call",
        2.0,
        True,
    )
    _say("  p95", f"{_percentile(fetches, 0.95) * 1e6:.0f} us", "", f"of {_percentile(calls, 0.95) * 1e6:.0f} us")


def views(client: Client, ns: Namespace, names: Sequence[bytes], rounds: int) -> None:
    """Making an array of a page, and of all pages of a lease."""
    times = []
    with client.fetch(ns, names) as lease:
        for _ in range(rounds):
            began = time.perf_counter()
            arrays = [lease.page(row) for row in range(len(names))]
            times.append((time.perf_counter() - began) / len(names))
            del arrays
    each = statistics.median(times) * 1e6
    _say("view creation", f"{each:.2f} us a page", f"{each / 5:.2f} x", "5 us", 1.0, True)


def store(client: Client, page_bytes: int, pages: int, rounds: int) -> None:
    """Fill and Commit beside two copies and one XXH3 of the same bytes by one thread."""
    ns = client.register(_layout(page_bytes))
    source = np.frombuffer(os.urandom(page_bytes), np.uint8)
    first, second = np.empty((2, pages, page_bytes), np.uint8)
    first.fill(1)
    second.fill(1)
    stored: list[bytes] = []

    def fill(block: int, part: int, page: Bytes) -> None:
        page[:] = source

    def write() -> None:
        stored[:] = [os.urandom(32) for _ in range(pages)]
        outcomes = client.write(ns, stored, fill)
        assert all(o.stored for o in outcomes), outcomes

    def drop() -> None:
        if stored:
            client.drop(ns, stored)

    def bound() -> None:
        drop()  # its time is not the write's
        began = time.perf_counter()
        for i in range(pages):  # the engine's copy into staging
            first[i] = source
        for i in range(pages):  # the node's into the tier, summed while it is hot
            second[i] = first[i]
            view = memoryview(second[i])
            for at in range(0, page_bytes, _CHUNK):
                xxhash.xxh3_64_intdigest(view[at : at + _CHUNK])
        bounds.append(time.perf_counter() - began)

    bounds: list[float] = []
    _, writes = _pair(bound, write, rounds)
    drop()
    least, have = statistics.median(bounds), statistics.median(writes)
    speed = page_bytes * pages / have / 1e9
    _say(
        f"store, {pages} pages of {page_bytes >> 10} KiB",
        f"{speed:.2f} GB/s",
        f"{least / have:.2f} x",
        "2 memcpy and XXH3",
        0.8,
    )


def model(client: Client, tokens: int, rounds: int) -> None:
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
        print("prefix of a model: not measured, torch and transformers are not installed")
        return
    from kvtier import _bench_model

    got = _bench_model.measure(client, tokens, rounds)
    warm, floor, slow = got["warm"], got["floor"], got["recompute"]
    _say(
        "miss tax, first token",
        f"{got['miss_tax']:.3f} x",
        f"{got['miss_tax']:.3f} x",
        "the same without kvtier",
        1.02,
        True,
    )
    _say(
        f"prefix of {tokens} tokens ({got['mib']:.0f} MiB)",
        f"{warm * 1e3:.0f} ms",
        f"{slow / warm:.1f} x faster",
        f"recompute, {slow * 1e3:.0f} ms",
    )
    _say(
        "  one copy and one token alone",
        f"{floor * 1e3:.0f} ms",
        f"{slow / floor:.1f} x faster",
        "what the bytes allow",
    )


def _say(what: str, have: str, ratio: str, beside: str, want: float | None = None, at_most: bool = False) -> None:
    verdict = ""
    if want is not None:
        value = float(ratio.split()[0])
        sign = "<=" if at_most else ">="
        verdict = f"{'ok  ' if (value <= want if at_most else value >= want) else 'MISS'} {sign} {want}"
    print(f"{what:38} {have:>16}  {ratio:>13} {beside:28} {verdict}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtier.bench", description=__doc__)
    parser.add_argument("--socket", default="", help="socket of a running node; default: one is started for the bench")
    parser.add_argument("--kvtier", default="kvtier", help="the binary that is started")
    parser.add_argument("--rounds", type=int, default=2000, help="of the short measurements")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt; 0: no model")
    args = parser.parse_args(argv)
    if args.socket:
        _run(args.socket, args)
    else:
        with _own_node(args.kvtier) as socket:
            _run(socket, args)
    return 0


def _run(socket: str, args: argparse.Namespace) -> None:
    with Client(socket, engine="kvtier.bench", stall_timeout=2.0) as client:
        client.wait_ready(10)
        ns = client.register(_layout(64 << 10))
        names = [os.urandom(32) for _ in range(_PAGES)]

        def fill(block: int, part: int, page: Bytes) -> None:
            page.fill(block)

        client.write(ns, names, fill)
        fetch(client, ns, names, args.rounds)
        views(client, ns, names, max(args.rounds // 10, 1))
        store(client, 256 << 10, 128, max(args.rounds // 100, 2))
        client.drop(ns, names)
        if args.tokens:
            model(client, args.tokens, max(args.rounds // 400, 1))


if __name__ == "__main__":
    sys.exit(main())
