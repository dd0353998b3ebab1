"""The consumer of a device pool in another process: imports descriptor 3 by the
driver's virtual memory calls, wraps it as a tensor without a copy where PyTorch
is found, and compares an attention over pages in place with PyTorch's.

Prints one JSON object: {"mapped": true, "map_ms": ..., "torch": version or null,
"same_address": ..., "relerr": ...}."""

import ctypes
import json
import sys
import time


class Allocation(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int), ("rest", ctypes.c_ubyte * 16)]


class Access(ctypes.Structure):
    _fields_ = [("location", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int)]


class Driver:
    """The calls that mapping takes, each by the version whose convention is used here."""

    VERSIONS = {"cuDeviceGet": 2000, "cuDevicePrimaryCtxRetain": 7000, "cuCtxSetCurrent": 4000, "cuMemImportFromShareableHandle": 10020,
                "cuMemAddressReserve": 10020, "cuMemMap": 10020, "cuMemSetAccess": 10020}

    def __init__(self, library):
        self.lib = ctypes.CDLL(library or "libcuda.so.1")
        self.ok(self.lib.cuInit(0), "cuInit")
        self.calls = {}
        for name, version in self.VERSIONS.items():
            pointer, status = ctypes.c_void_p(), ctypes.c_int()
            self.ok(self.lib.cuGetProcAddress_v2(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(0), ctypes.byref(status)), name)
            self.calls[name] = ctypes.CFUNCTYPE(ctypes.c_int)(pointer.value)

    @staticmethod
    def ok(code, what):
        if code != 0:
            raise RuntimeError(f"{what}: CUDA error {code}")

    def __call__(self, name, *args):
        self.ok(self.calls[name](*args), name)


def map_pool(driver, ordinal, size):
    device, context, handle, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    driver("cuDeviceGet", ctypes.byref(device), ordinal)
    driver("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    driver("cuCtxSetCurrent", context)
    driver("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(3), 1)
    driver("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
    driver("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
    want = Access(1, device.value, 1)
    driver("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(want), ctypes.c_size_t(1))
    return address.value


class Memory:
    """What torch.as_tensor takes without a copy."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def compare(torch, address, want):
    device = torch.device("cuda", want["ordinal"])
    whole = torch.as_tensor(Memory(address, want["bytes"]), device=device)
    heads, dim, tokens = want["kv_heads"], want["dim"], want["page_tokens"]
    group = want["q_heads"] // heads
    count = want["pages"] * 2 * tokens * heads * dim
    pool = whole[want["pool"]:want["pool"] + 2 * count].view(torch.bfloat16).view(want["pages"], 2, tokens, heads, dim)
    batch = len(want["lengths"])
    q = whole[want["q"]:want["q"] + 2 * batch * want["q_heads"] * dim].view(torch.bfloat16).view(batch, heads, group, dim).double()
    ours = whole[want["out"]:want["out"] + 4 * batch * want["q_heads"] * dim].view(torch.float32).view(batch, heads, group, dim).double()
    worst = 0.0
    for b, length in enumerate(want["lengths"]):
        kv = pool[torch.tensor(want["tables"][b], device=device)].double()
        k = kv[:, 0].reshape(-1, heads, dim)[:length]
        v = kv[:, 1].reshape(-1, heads, dim)[:length]
        scores = torch.einsum("hgd,thd->hgt", q[b], k) / dim ** 0.5
        right = torch.einsum("hgt,thd->hgd", torch.softmax(scores, dim=-1), v)
        worst = max(worst, float((ours[b] - right).norm() / right.norm()))
    return {"torch": torch.__version__, "same_address": whole.data_ptr() == address, "relerr": worst}


def main():
    want = json.loads(sys.argv[1])
    driver = Driver(want["library"])
    start = time.perf_counter()
    address = map_pool(driver, want["ordinal"], want["bytes"])
    answer = {"mapped": True, "map_ms": 1e3 * (time.perf_counter() - start), "torch": None}
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        answer |= compare(torch, address, want)
        if not answer["same_address"] or not answer["relerr"] < 1e-4:
            print(json.dumps(answer), file=sys.stderr)
            sys.exit(1)
    print(json.dumps(answer))


main()
