"""How ranks meet: each has a line to rank 0, and all a process group, through a store of torch.distributed."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from minisgl.config import EngineConfig
from minisgl.host import aside
from minisgl.parallel.crew import START_S, Crew, Other, Place, Task
from minisgl.parallel.linked import Exchanges, linked_sum
from minisgl.parallel.ranks import Ranks

_FOREVER = timedelta(days=365)  # torch's own time-outs know nothing of what a rank is doing
_LEADER = "leader"  # the port where rank 0 waits for the others, and what they must have been told as well
_OWN = {"model", "revision", "node_rank", "dist_init_addr"}  # fields of the config in which hosts may differ


@contextmanager
def lead(place: Place, config: EngineConfig, task: Task) -> Iterator[tuple[Ranks, Crew]]:
    """Start the other ranks of this host, with the task, and meet all; this process is rank 0.

    What is done in here is the start of all: it may take as long as it likes if only some rank gets further.
    """
    store, place = open_store(place)
    if place.torchrun and store.check([_LEADER]):
        raise ValueError("torchrun's other ranks have ended with their first engine: a script has one there")
    with _listen(place.host) as listener:
        store.set(_LEADER, msgspec.json.encode((listener.getsockname()[1], _asked(task))).decode())
        crew = _crew(place, config, task, [Other(rank) for rank in range(place.local_size, place.size)])
        try:
            with crew.at_work(max(START_S, config.step_timeout), together=True):
                crew.receive(listener)
                yield make_ranks(place, config, store, place.host, crew.keep), crew
        except BaseException:
            crew.close()
            raise


@contextmanager
def join(place: Place, config: EngineConfig, task: Task) -> Iterator[tuple[Ranks, socket.socket]]:
    """Start the other ranks of this host, where that is this one's part, and meet all; yields the line to rank 0."""
    if config.device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // (place.size // config.nnodes)))
    if not place.torchrun:
        _reach(place.host, place.port, START_S)  # torch's own wait writes a warning for each try
    try:
        store, _ = aside(lambda: open_store(place))  # inside torch, which heeds no Ctrl-C
        port, alike = msgspec.json.decode(aside(lambda: store.get(_LEADER)))
    except RuntimeError as error:
        raise ConnectionError(f"rank 0 does not answer at {place.host}:{place.port}") from error
    with closing(socket.create_connection((place.host, port))) as line:
        asked = _asked(task)
        differ = [f"{name} is {asked.get(name)}, there {it}" for name, it in alike.items() if asked.get(name) != it]
        if differ:
            raise ValueError(f"not the options or the model of the first host: {'; '.join(differ)}")
        line.sendall(place.rank.to_bytes(4, "little"))
        if not line.recv(1):
            raise ValueError(f"rank 0 awaits no rank {place.rank}: node_rank must be another on each host")
        crew = _crew(place, config, task, [Other(0, line=line)])
        with crew.at_work(together=True):
            yield make_ranks(place, config, store, line.getsockname()[0], crew.keep), line
        crew.close()


def open_store(place: Place) -> tuple[Store, Place]:
    """The store where all meet, which rank 0 holds, and the place with its port."""
    patience = timedelta(seconds=START_S)
    if place.torchrun:
        return next(iter(rendezvous("env://", place.rank, place.size, timeout=patience)))[0], place
    fd = None
    if place.rank == 0:
        with _listen(place.host, place.port) as listener:  # torch's own would listen on all networks
            place, fd = replace(place, port=listener.getsockname()[1]), listener.detach()
    return TCPStore(place.host, place.port, None, fd is not None, patience, False, master_listen_fd=fd), place


def _listen(host: str, port: int = 0) -> socket.socket:
    """A socket that listens at an address of this host, and there alone; ValueError where it cannot."""
    try:
        return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0])
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}, no free port of this host: {error.strerror}") from error


def _reach(host: str, port: int, within_s: float) -> None:
    """Wait until something listens at an address; ConnectionError, with the reason, where nothing does in time."""
    until_s = time.monotonic() + within_s
    while True:
        try:
            return socket.create_connection((host, port), 2.0).close()
        except OSError as error:
            if time.monotonic() > until_s:
                raise ConnectionError(f"nobody answers at {host}:{port}: {error}") from error
        time.sleep(0.2)


def _asked(task: Task) -> dict[str, Any]:
    """What must be the same for all ranks, as JSON has it."""
    options = {name: value for name, value in task.config.items() if name not in _OWN}
    model = {f"the model's {name}": value for name, value in msgspec.to_builtins(task.model).items()}
    return msgspec.json.decode(msgspec.json.encode(options | model))


def _crew(place: Place, config: EngineConfig, task: Task, coming: list[Other]) -> Crew:
    """The ranks that this process starts, and those that it has a line to."""
    places = [replace(place, rank=place.rank + i, local_rank=i, local_size=1) for i in range(1, place.local_size)]
    others = [*(Other(each.rank) for each in places), *coming]
    return Crew(others, [msgspec.structs.replace(task, place=each) for each in places], config.device == "cuda")


def make_ranks(
    place: Place, config: EngineConfig, store: Store, address: str, keep: Callable[[object], None] = lambda _: None
) -> Ranks:
    """All ranks as a process group: NCCL on GPUs, gloo, over this host's `address`, on CPUs.

    It is no part of torch's own list of groups, which has room for one set of ranks in a process. `keep` is given what
    must not be freed where something fails, before it is used.
    """
    group = ProcessGroup(exchanges := Exchanges(store), place.rank, place.size)
    device, kinds = torch.device(config.device), ProcessGroup.BackendType
    if config.device == "cpu":
        kind, options = kinds.GLOO, ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._timeout, options._devices = _FOREVER, [ProcessGroupGloo.create_device(hostname=address)]
        backend = ProcessGroupGloo(PrefixStore("gloo", store), place.rank, place.size, options)
    else:
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not part of a torch for CPUs

        torch.cuda.set_device(place.local_rank)
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # no multicast
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # when a rank ends, the crew knows better what to do
        kind, options = kinds.NCCL, ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        backend = ProcessGroupNCCL(PrefixStore("nccl", store), place.rank, place.size, options)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    ranks = Ranks(place.rank, place.size, group)
    keep(ranks)
    if config.device == "cpu" or not place.one_host:
        return ranks
    return replace(ranks, sum_small=linked_sum(ranks, exchanges, getattr(torch, config.dtype)))
