"""The checksum of a page (docs/formats.md)."""

from __future__ import annotations

import struct
from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

CHUNK_BYTES = 64 << 10


def page_checksum(page: bytes | memoryview | npt.NDArray[np.uint8]) -> int:
    """XXH3-64 over the XXH3-64 values of the 64 KiB chunks, seeded with the length of the page."""
    view = page if isinstance(page, memoryview) else memoryview(cast(bytes, page))
    sums = [xxhash.xxh3_64_intdigest(view[at : at + CHUNK_BYTES]) for at in range(0, len(view), CHUNK_BYTES)]
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums), seed=len(view))
