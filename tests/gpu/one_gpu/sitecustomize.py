"""Two ranks on one GPU, where there is no second: Python imports this first if this folder is on its path.

The ranks are two processes, with all of minisgl's own code, kernels and CUDA graphs. NCCL refuses two of them on one
GPU: gloo takes its place, over the host. Memory that both see is torch's, as ever, if
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1. The ways to sum are not timed, for processes that take turns on a GPU have
no times to speak of: both over that memory are used, by the size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d


class GlooForNccl:
    """Looks like ProcessGroupNCCL."""

    Options: Any = c10d.ProcessGroupGloo._Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
        """The gloo group."""
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return c10d.ProcessGroupGloo(store, rank, size, options)


def share_one_gpu(change: Callable[[Any, str, Any], object] = setattr) -> None:
    """Let this process take one GPU for two; `change` sets attributes."""
    from minisgl.parallel import linked

    torch.cuda.init()  # before it is told of more GPUs than there are
    set_device = torch.cuda.set_device
    change(torch.cuda, "device_count", lambda: 2)
    change(torch.cuda, "set_device", lambda _: set_device(0))
    change(torch.cuda, "can_device_access_peer", lambda *_: True)
    change(c10d, "ProcessGroupNCCL", GlooForNccl)
    change(linked, "seconds", pretend)


def pretend(way: Callable[[Any], Any], x: Any) -> float:
    """Seconds by which one shot is chosen for every other size, two shots for those between, and gloo for none."""
    liked = "one_shot" if x.nbytes.bit_length() % 2 else "two_shots"
    return {liked: 1.0, "all_reduce": 3.0}.get(way.__name__, 2.0)


if __name__ == "sitecustomize":
    share_one_gpu()
