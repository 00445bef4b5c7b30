"""Sums of small tensors over memory that the GPUs of one host see of each other (torch's symmetric memory).

One kernel reads what the others have: for small tensors that takes less time than NCCL's protocols, which copy. Up to
which size is measured at the start. NVLink's multicast is left alone.
"""

import logging
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from minisgl.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

_SMALLEST_BYTES, _LARGEST_BYTES = 1 << 12, 1 << 22
_CALLS, _REPLAYS = 20, 5

Sum = Callable[[Tensor], Tensor]


def linked_sum(ranks: Ranks, store: "Exchanges", dtype: torch.dtype) -> "LinkedSum | None":
    """What sums small tensors of a type; None, on all ranks, where there is no such memory, or no use in it."""
    device = torch.device("cuda", torch.cuda.current_device())
    sees_all = all(torch.cuda.can_device_access_peer(device.index, i) for i in range(ranks.size) if i != device.index)
    if not ranks.least(sees_all and dtype in (torch.bfloat16, torch.float32), device):
        return None
    made = None
    try:
        made = LinkedSum(ranks, store, dtype, device)
    except RuntimeError as error:
        logger.warning("GPUs see nothing of each other's memory, which makes small steps slower: %s", error)
    if not ranks.least(made is not None, device) or made is None:
        return None
    made.measure(ranks)
    return made


class LinkedSum:
    """A buffer that all ranks see. A kernel begins when all have put in what is theirs, and ends when all have read."""

    def __init__(self, ranks: Ranks, store: "Exchanges", dtype: torch.dtype, device: torch.device) -> None:
        assert ranks.group is not None
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read when the first such memory is made
        # torch finds groups by name, and another engine of this process must have another: rank 0 makes one up.
        if ranks.rank == 0:
            store.set("linked", f"minisgl-{os.getpid()}-{os.urandom(8).hex()}")
        self._group: Any = store.get("linked").decode()
        ranks.group._set_group_name(self._group)
        c10d._register_process_group(self._group, ranks.group)
        memory, self._store = c10d._SymmetricMemory, store  # torch keeps the half in C++ alone, which needs this one
        memory.set_group_info(self._group, ranks.rank, ranks.size, store)
        self._buffer: Tensor = memory.empty_strided_p2p((_LARGEST_BYTES // dtype.itemsize,), (1,), dtype, device)
        self._handle = memory.rendezvous(self._buffer, self._group)
        self._operations: Any = torch.ops.symm_mem
        self._best: list[str] = []  # names: its own methods here would keep it, and the store's port, for a while
        self.times_s: dict[int, Mapping[str, float]] = {}
        """What each way takes, by bytes: of the slowest rank."""

    def __call__(self, x: Tensor) -> Tensor | None:
        """The sum of all ranks' x; None where NCCL is faster, or alone can do it."""
        if x.nbytes > _LARGEST_BYTES or x.nbytes % 16 or x.dtype != self._buffer.dtype:
            return None
        way = self._best[max(0, (x.nbytes - 1).bit_length() - _SMALLEST_BYTES.bit_length() + 1)]
        return self.one_shot(x) if way == "one shot" else self.two_shots(x) if way == "two shots" else None

    def one_shot(self, x: Tensor) -> Tensor:
        """Every rank reads all of all."""
        mine, total = self._buffer[: x.numel()].view(x.shape), torch.empty_like(x)
        return self._operations.one_shot_all_reduce_copy_out(mine, x, "sum", self._group, total)

    def two_shots(self, x: Tensor) -> Tensor:
        """Every rank sums a part of all, and all read all sums."""
        mine = self._buffer[: x.numel()].view(x.shape).copy_(x)
        return self._operations.two_shot_all_reduce_out(mine, "sum", self._group, torch.empty_like(x))

    def measure(self, ranks: Ranks) -> None:
        """Choose for each size what is fastest here, alike on all ranks, of what gives the right sum."""
        device, dtype = self._buffer.device, self._buffer.dtype
        ways: dict[str, Sum] = {"one shot": self.one_shot}
        if ranks.size in (2, 4, 8):
            ways["two shots"] = self.two_shots
        numbers = (torch.arange(4096, device=device) % 4 * (ranks.rank + 1)).to(dtype)
        right = ranks.all_reduce(numbers.clone())
        ways = {name: way for name, way in ways.items() if ranks.least(torch.equal(way(numbers), right), device)}
        for power in range((_LARGEST_BYTES // _SMALLEST_BYTES).bit_length()):
            x = torch.zeros((_SMALLEST_BYTES << power) // dtype.itemsize, dtype=dtype, device=device)
            own = torch.tensor([seconds(way, x) for way in (ranks.all_reduce, *ways.values())], device=device)
            times = dict(zip(("NCCL", *ways), ranks.gather(own).amax(dim=0).tolist(), strict=True))
            self.times_s[x.nbytes] = times
            self._best.append(min(times, key=times.__getitem__))
        logger.debug("all-reduce, in seconds by bytes: %s", self.times_s)


class Exchanges(c10d.Store):
    """A store through which torch's symmetric memory meets: its exchanges are numbered from 0.

    Torch numbers them through a process's life. So one that has had an engine would wait for numbers that ranks which
    have just been started never come to.
    """

    def __init__(self, store: c10d.Store) -> None:
        super().__init__()
        self.store, self._numbers = store, dict[str, int]()

    def _key(self, key: str) -> str:
        """Of a key like prefix/number, whatever follows."""
        return re.sub(r"(?<=/)\d+", lambda it: str(self._numbers.setdefault(it[0], len(self._numbers))), key, count=1)

    def set(self, key: str, value: str) -> None:
        """As the store."""
        self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """As the store: waits until there is one."""
        return self.store.get(self._key(key))

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """As the store, with the store's own time-out."""
        self.store.wait([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        """As the store."""
        return self.store.add(self._key(key), value)


def seconds(way: Sum, x: Tensor) -> float:
    """How long a sum takes the device, in a CUDA graph of several."""
    graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        way(x)
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(_CALLS):
            way(x)
        graph.capture_end()
    graph.replay()
    begin.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _CALLS / _REPLAYS
