"""The installed wheel against a real node: python wheel.py KVTIER. It needs nothing else; run by `make python`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import kvtier
from kvtier import aio, check
from kvtier.chain import names_of_tokens

LAYOUT = kvtier.Layout(
    model="wheel/model",
    kv_dtype="float16",
    attention="gqa",
    layers=1,
    engine_layout="wheel/1",
    hash_algorithm="vllm/sha256_cbor",
    hash_seed="vllm-none-hash",
    block_tokens=16,
    parts=(kvtier.Part("kv", 8192),),
)


def use(socket: str, address: str) -> None:
    names = names_of_tokens(list(range(64)), 16)
    with kvtier.Client(socket, stall_timeout=3) as client:
        ns = client.register(LAYOUT)
        outcomes = client.write(ns, names, lambda block, part, page: page.fill(block + 1))
        assert all(outcome.stored for outcome in outcomes), outcomes
        with client.fetch(ns, names) as lease:
            assert [int(lease.page(row)[0]) for row in range(lease.usable_blocks)] == [1, 2, 3, 4]
    with kvtier.Client(address=address, stall_timeout=3) as far:
        ns = far.register(LAYOUT)
        assert np.array_equal(far.fetch(ns, names).page(3), np.full(8192, 4, np.uint8))

    async def awaited() -> None:
        async with await aio.AsyncClient.open(socket, stall_timeout=3) as client:
            found = await client.lookup(await client.register(LAYOUT), names)
            assert found.usable_blocks == 4

    asyncio.run(awaited())


def main(binary: str) -> None:
    installed = Path(kvtier.__file__).resolve()
    assert installed.is_relative_to(Path(sys.prefix).resolve()), f"{installed} is not the wheel of {sys.prefix}"
    assert (installed.parent / "py.typed").exists()
    with tempfile.TemporaryDirectory(prefix="kvt") as directory:
        socket = f"{directory}/k.sock"
        args = [binary, "serve", f"--socket={socket}", f"--dir={directory}/data", "--nvme=0", "--ram=256MiB"]
        args += ["--http-listen=off", "--listen=127.0.0.1:0", "--log-level=error"]
        env = {k: v for k, v in os.environ.items() if not k.startswith("KVTIER_")}
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True, env=env) as node:
            try:
                assert node.stdout is not None
                line = node.stdout.readline()
                assert line.startswith("ready"), f"{binary} serve did not start: {line!r}"
                said = dict(word.split("=", 1) for word in line.split() if "=" in word)
                assert check.main(["--socket", socket]) == 0
                use(socket, said["listen"])
            finally:
                node.terminate()
                node.wait(60)
    print(f"kvtier {installed} works with {binary}")


if __name__ == "__main__":
    main(sys.argv[1])
