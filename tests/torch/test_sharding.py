"""Who holds what: shards make up the whole, and what can't be parted is refused; and how ranks talk."""

import dataclasses
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from server_process import listening
from torch.distributed import HashStore, PrefixStore

from minisgl.batch import Batch, Joins, Ragged
from minisgl.build import resolve, resolve_kernels
from minisgl.config import EngineConfig
from minisgl.kernels.gumbel import choose_fused, find_fused, sample
from minisgl.model.decoder import Decoder
from minisgl.model.weights import _places, dummy_weights, load_weights
from minisgl.parallel import linked, meeting
from minisgl.parallel.crew import Place, Task, find_place
from minisgl.parallel.line import pack, receive, unpack
from minisgl.parallel.linked import Exchanges, LinkedSum
from minisgl.parallel.meeting import make_ranks, open_store
from minisgl.parallel.ranks import ALONE, Ranks
from minisgl.parallel.sharding import Shard, Vocabulary, check_divisible, heads, shards
from minisgl.source.model_config import read_model_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("whole", [3, 7, 47, 48, 320, 1001, 49_152, 151_936])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_follow_each_other_and_are_nearly_even(whole, size):
    parts = shards(whole, Ranks(size=size))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == whole and all(part.whole == whole for part in parts)
    assert min(part.size for part in parts) > 0
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 32
    if whole >= 16 * size:
        assert all(part.start % 16 == 0 for part in parts)


def test_fewer_heads_than_ranks_are_shared_by_neighbours():
    assert [heads(8, Ranks(rank, 4)) for rank in range(4)] == [Shard(2 * r, 2 * r + 2, 8) for r in range(4)]
    assert [heads(2, Ranks(rank, 4)).start for rank in range(4)] == [0, 0, 1, 1]
    assert heads(2, Ranks(3, 4)).of_heads(64) == Shard(64, 128, 128)


@pytest.mark.parametrize("fill", ["loaded", "dummy"])
@pytest.mark.parametrize("size", [3, 6])
def test_what_ranks_hold_makes_up_the_model(size, fill, tiny_model):
    """Every element of the whole is on one rank, but for key heads, norms and biases that several have."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "vocab_size": 321}
    bias = {"attention_bias": True, "mlp_bias": True}
    folder = tiny_model("LlamaForCausalLM", **shape, **bias)
    config = read_model_config(folder)

    def filled(ranks: Ranks) -> Decoder:
        model = Decoder(config, torch.float32, CPU, ranks)
        if fill == "dummy":
            dummy_weights(model)
        else:
            load_weights(model, folder)
        return model

    model = filled(ALONE)
    whole = {name: place.pieces[0][0].tensor for name, place in _places(model).items() if len(place.pieces) == 1}
    times = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
    for rank in range(size):
        for name, place in _places(filled(Ranks(rank, size))).items():
            if name in whole:
                ((piece, region),) = place.pieces
                assert torch.equal(piece.tensor, whole[name][region]), name
                times[name][region] += 1
    for name, count in times.items():
        shared = size if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")) else 1
        expected = max(1, size // 3) if ".k_proj" in name or ".v_proj" in name else shared
        assert (count == expected).all(), name


def test_what_cannot_be_parted_is_refused_with_what_could_be(tiny_model):
    model = read_model_config(tiny_model("LlamaForCausalLM"))
    smollm2 = dataclasses.replace(model, num_heads=9, num_kv_heads=3)
    with pytest.raises(ValueError, match=r"^tp=2: the model has 9 heads and 3 key heads: tp may be 1, 3 or 9$"):
        check_divisible(smollm2, 2)
    for size in (1, 3, 9):
        check_divisible(smollm2, size)
    for heads_, kv_heads, possible in ((8, 2, [1, 2, 4, 8]), (12, 8, [1, 2, 4]), (5, 5, [1, 5]), (1, 1, [1])):
        shape = dataclasses.replace(model, num_heads=heads_, num_kv_heads=kv_heads)
        for size in range(1, 14):
            if size in possible:
                check_divisible(shape, size)
            else:
                with pytest.raises(ValueError, match=rf"tp may be {possible[0]}"):
                    check_divisible(shape, size)
    with pytest.raises(ValueError, match="tp=3"):
        resolve_kernels(resolve(EngineConfig(device="cpu", tp=3)), model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 3, "nnodes": 2, "dist_init_addr": "a:1"}, r"nnodes=2: tp=3 must be a multiple"),
        ({"tp": 2, "nnodes": 2}, r"dist_init_addr HOST:PORT of the first host, got None"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "alone"}, r"got 'alone'"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "a:65536"}, r"got 'a:65536'"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "0.0.0.0:99"}, r"of the first host, got '0.0.0.0:99'"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "[::]:99"}, r"of the first host, got '\[::\]:99'"),
        ({"tp": 2, "nnodes": 2, "node_rank": 2}, r"node_rank=2: it must be less than nnodes=2"),
    ],
)
def test_hosts_that_do_not_fit_together_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(device="cpu", **fields))


def test_torchrun_and_tp_must_say_the_same(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"^tp=2, nnodes=1: torchrun has started 4 ranks"):
        resolve(EngineConfig(device="cpu", tp=2))


def test_a_process_that_torchrun_has_not_started_itself_starts_its_ranks(monkeypatch):
    """Only its run's name may have come from whoever started this."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_place(EngineConfig(device="cpu", tp=2)) == Place(0, 2, 0, 2, "127.0.0.1", 0)


@pytest.mark.parametrize(("nnodes", "threads"), [(1, 2), (2, 4), (4, 8)])
def test_ranks_share_the_threads_of_their_own_host(nnodes, threads, monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    config = EngineConfig(device="cpu", tp=8, nnodes=nnodes)
    task = Task(Place(1, 8, 1, 1, "127.0.0.1", 1, torchrun=True), {}, "", "", None)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(meeting, "open_store", lambda _: pytest.fail("and no further", pytrace=False))
    with pytest.raises(pytest.fail.Exception), meeting.join(task.place, config, task):
        pass
    assert taken == [threads]


def test_fewer_gpus_than_ranks_are_refused_before_anything_is_fetched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^tp=4 wants 4 GPUs of this host, and torch sees 2: .*CUDA_VISIBLE_DEVICES"):
        resolve(EngineConfig(device="cuda", tp=4))


def some_batch() -> Batch:
    joins = dataclasses.replace(
        Joins.greedy(np.array([1, 3], np.int32)),
        seed=np.array([-(2**63), 2**63 - 1]),
        history=Ragged.of([[1, 2, 3], []]),
        bias=Ragged.of([[], [0.5]], np.float32),
    )
    return Batch(
        slots=np.array([0, 1, 3], np.int32),
        q_len=np.array([1, 2, 3], np.int32),
        kv_len=np.array([9, 2, 3], np.int32),
        num_decode=1,
        input_ids=np.arange(5, dtype=np.int32),
        samples=np.array([True, False, True]),
        page_writes=np.empty((0, 3), np.int32),
        joins=joins,
    )


def assert_equal(one, other) -> None:
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_equal(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape and (one == other).all()
        assert other.flags.writeable
    else:
        assert one == other and type(one) is type(other)


def test_a_batch_arrives_as_it_was_sent():
    assert_equal(some_batch(), unpack(pack(some_batch())[8:]))
    nobody_joins = dataclasses.replace(some_batch(), joins=Joins.greedy(np.empty(0, np.int32)))
    assert_equal(nobody_joins, unpack(pack(nobody_joins)[8:]))
    assert len(pack(nobody_joins)) < len(pack(some_batch())) // 2


def test_batches_come_whole_and_in_order_however_the_line_cuts_them_until_it_is_closed():
    ours, theirs = socket.socketpair()
    long = dataclasses.replace(some_batch(), input_ids=np.arange(1_000_000, dtype=np.int32))
    sent = b"".join(pack(batch) for batch in (some_batch(), long, some_batch()))

    def send() -> None:
        with ours:
            for at in range(0, len(sent), 70_001):
                ours.sendall(sent[at : at + 70_001])

    sender = threading.Thread(target=send)
    sender.start()
    with theirs, theirs.makefile("rb") as line:
        for batch in (some_batch(), long, some_batch()):
            got = receive(line)
            assert got is not None
            assert_equal(batch, got)
        assert receive(line) is None
    sender.join()


def test_a_line_that_breaks_within_a_message_has_no_more():
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(pack(some_batch())[:50])
        assert receive(theirs.makefile("rb")) is None


def test_exchanges_of_torch_are_one_whatever_the_numbers_that_processes_have_come_to():
    """By the keys and calls of its symmetric memory, from C++; a process that has had engines has come further."""
    store = HashStore()

    def meet(rank: int, first: int) -> list[list[bytes]]:
        exchanges, got = Exchanges(store), []
        line = PrefixStore("all", exchanges)
        for number in range(first, first + 3):
            line.set(f"CUDASymmetricMemory/{number}/{rank}", f"{number - first} of {rank}")
            got.append(line.multi_get([f"CUDASymmetricMemory/{number}/{each}" for each in range(3)]))
            line.barrier(f"CUDASymmetricMemory/{number + 3}", 3)
        return got

    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(meet, rank, first) for rank, first in enumerate([9, 0, 100])]
        for rank in ranks:
            assert rank.result(20) == [[f"{number} of {each}".encode() for each in range(3)] for number in range(3)]


@pytest.mark.parametrize(("fastest", "taken"), [("one_shot", True), ("all_reduce", False)])
def test_sums_over_memory_are_those_found_fastest_and_keep_no_port_once_let_go(fastest, taken, monkeypatch):
    """One rank, with memory that it shares with nobody; torch keeps a group's name and its store for good."""
    symmetric, before = linked.c10d._SymmetricMemory, listening(os.getpid())
    empty = staticmethod(lambda size, _, dtype, device: torch.empty(size, dtype=dtype, device=device))
    monkeypatch.setattr(symmetric, "empty_strided_p2p", empty)
    monkeypatch.setattr(symmetric, "rendezvous", staticmethod(lambda *_: None))
    copy = SimpleNamespace(one_shot_all_reduce_copy_out=lambda mine, x, kind, group, total: total.copy_(x))
    monkeypatch.setattr(torch.ops, "symm_mem", copy)
    monkeypatch.setattr(linked, "seconds", lambda way, _: 1.0 if way.__name__ == fastest else 2.0)
    place = Place(0, 1, 0, 1, "127.0.0.1", 0)
    store, place = open_store(place)
    ranks = make_ranks(place, EngineConfig(device="cpu", dtype="float32"), store, place.host)
    made = LinkedSum(ranks, Exchanges(store), torch.float32, CPU)
    made.measure(ranks)
    sums = [made(torch.full((size // 4,), 3.0)) for size in (16, 1 << 12, (1 << 12) + 16, 1 << 22)]
    assert [total is not None and bool((total == 3.0).all()) for total in sums] == [taken] * 4
    assert made(torch.ones(5)) is None and made(torch.ones((1 << 20) + 4)) is None
    assert listening(os.getpid()) != before
    del made, ranks, store
    assert listening(os.getpid()) == before


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("vocab", [7, 5000, 9001])
@pytest.mark.parametrize("interpreted", [False, True], ids=["torch", "kernel"])
def test_a_token_is_drawn_alike_from_the_whole_vocabulary_and_from_its_parts(size, vocab, interpreted):
    generator = torch.Generator().manual_seed(vocab)
    rows = 2 if interpreted else 40
    logits = torch.randn(rows, vocab, generator=generator) * 2
    logits[0, [1, 5]] = logits.max() + 1  # of equals the lowest wins, wherever they lie
    slots, positions = torch.arange(rows), torch.arange(rows) + 5
    temperature = torch.tensor([0.0, 0.9] * (rows // 2))
    seed = torch.arange(rows) * 7919
    rest = (slots, temperature, seed, positions)
    parts = Vocabulary.of(vocab, Ranks(size=size)).parts
    found = []
    for part in parts:
        mine = logits[:, part.start : part.stop].contiguous()
        if interpreted:
            with np.errstate(all="ignore"):
                found.append(find_fused(mine, *rest, part.start, max(p.size for p in parts) // 4096 + 2))
        else:
            sample(mine, *rest, (part.start, 0, lambda each: found.append(each) or each[None]))
    if interpreted:
        with np.errstate(all="ignore"):
            got = choose_fused(torch.stack(found), slots, temperature)
    else:
        got = sample(logits[:, :1].clone(), *rest, (0, 0, lambda _: torch.stack(found)))
    assert got.tolist() == sample(logits, *rest).tolist()
    assert got[0] == 1


def test_a_part_of_the_vocabulary_that_is_no_number_spoils_the_row_wherever_it_lies():
    logits = torch.zeros(3, 40)
    logits[0, 30], logits[1, 2], logits[2, 5:] = torch.nan, torch.inf, -torch.inf
    slots, zeros = torch.arange(3), torch.zeros(3)
    rest = (slots, zeros, torch.zeros(3, dtype=torch.int64), slots)
    found: list[torch.Tensor] = []
    for start in (0, 16):
        part = logits[:, start : start + 16 if start == 0 else 40]
        sample(part, *rest, (start, 0, lambda each: found.append(each) or each[None]))
    assert sample(logits[:, :1].clone(), *rest, (0, 0, lambda _: torch.stack(found))).tolist() == [-1, -1, 0]
