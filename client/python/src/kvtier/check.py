"""python -m kvtier.check: whether this process can attach, map, write and fetch, and how to mend what is missing."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtier._memory import Bytes
from kvtier.client import DEFAULT_SOCKET, Client
from kvtier.errors import KvtierError
from kvtier.words import Layout, Namespace, Part

_LAYOUT = Layout(
    model="kvtier/check",
    kv_dtype="uint8",
    attention="mha",
    layers=1,
    engine_layout="kvtier/check",
    hash_algorithm="kvtier/random",
    block_tokens=1,
    parts=(Part("bytes", 4096),),
)


@dataclass
class _Steps:
    """Each step prints what it found; the first that fails ends the check."""

    failed: list[str] = field(default_factory=list)

    def step(self, name: str, do: Callable[[], str]) -> bool:
        if self.failed:
            return False
        try:
            print(f"ok    {name}: {do()}")
        except (KvtierError, OSError, ImportError) as e:
            print(f"FAIL  {name}: {e}")
            self.failed.append(name)
        return not self.failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtier.check", description=__doc__)
    parser.add_argument("--socket", default="", help=f"socket of the node on this machine (default {DEFAULT_SOCKET})")
    parser.add_argument("--address", default="", help="host:port of a node on another machine")
    parser.add_argument("--token", default=os.environ.get("KVTIER_TOKEN", ""), help="bearer token; also KVTIER_TOKEN")
    args = parser.parse_args(argv)
    steps = _Steps()
    _limits()
    made: list[Client] = []
    socket = "" if args.address else args.socket or DEFAULT_SOCKET

    def attach() -> str:
        client = Client(socket, address=args.address, token=args.token, engine="kvtier.check", staging_bytes=1 << 20)
        made.append(client)
        client.wait_ready(client.times.dial)
        return f"{socket or args.address}, tenant {client.tenant or 'as the node decides'}"

    try:
        steps.step("attach", attach)
        if made:
            _use(steps, made[0])
    finally:
        for client in made:
            client.close()
    print("kvtier can be used from here" if not steps.failed else f"kvtier cannot be used from here: {steps.failed[0]}")
    return 1 if steps.failed else 0


def _limits() -> None:
    """Each extent takes a descriptor or two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        print(
            f"WARN  open files: the limit is {soft}; a large node hands over many extents: ulimit -n {min(hard, 65536)}"
        )


def _use(steps: _Steps, client: Client) -> None:
    name, page = os.urandom(32), np.frombuffer(os.urandom(4096), np.uint8)
    spaces: list[Namespace] = []

    def register() -> str:
        spaces.append(client.register(_LAYOUT))
        return spaces[0].id[:6].hex()

    def write() -> str:
        def fill(block: int, part: int, into: Bytes) -> None:
            into[:] = page

        return client.write(spaces[0], [name], fill)[0].name.lower()

    def fetch() -> str:
        with client.fetch(spaces[0], [name]) as lease:
            got = lease.page(0) if lease.rows else None
            if got is None or not np.array_equal(got, page):
                raise KvtierError(f"the page that was written is not found: {lease.shortfalls}")
            del got
        return "streamed, verified" if client.streamed else f"in place; {client.mapped_bytes >> 20} MiB mapped"

    steps.step("register", register)
    steps.step("write", write)
    steps.step("fetch", fetch)
    if spaces:
        client.drop(spaces[0], [name])


if __name__ == "__main__":
    sys.exit(main())
