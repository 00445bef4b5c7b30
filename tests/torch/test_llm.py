import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.build import resolve, resolve_kernels
from minisgl.scheduler.scheduler import Demand
from minisgl.source.model_config import read_model_config

MODELS = Path(__file__).parents[2] / "bench_configs" / "models"

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
SETTINGS = {
    "defaults": {},
    "chunks of 7": {"chunked_prefill_size": 7},
    "page size 1": {"page_size": 1},
    "page size 64": {"page_size": 64},
    "overlap": {"overlap": True},
    "overlap, chunks of 7": {"overlap": True, "chunked_prefill_size": 7},
    "overlap off": {"overlap": False},
    "separate batches": {"mixed_batch": False, "chunked_prefill_size": 50},
    "no cache": {"cache": "none"},
    "three at a time": {"max_running_requests": 3},
    "few pages": {"num_pages": 24, "chunked_prefill_size": 16, "overlap": True},
    "few pages, no overlap, lpm": {"num_pages": 24, "overlap": False, "schedule_policy": "lpm"},
    "few pages, separate, no cache": {"overlap": True, "num_pages": 24, "mixed_batch": False, "cache": "none"},
    "few pages of one token": {"overlap": True, "num_pages": 330, "page_size": 1, "chunked_prefill_size": 40},
}
NEW_TOKENS = 24


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 320) for _ in range(200)]
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 65, 100, 300]
    fresh = [[rng.randrange(3, 320) for _ in range(n)] for n in lengths]
    return [*fresh, *([*shared[:n], rng.randrange(3, 320)] for n in (16, 40, 80, 150, 200))]


@pytest.fixture(scope="module")
def reference(tiny_model):
    """Greedy tokens of transformers for the prompts, by architecture."""
    known: dict[str, list[list[int]]] = {}

    def answers(architecture: str) -> list[list[int]]:
        if architecture not in known:
            model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model(architecture), dtype=torch.float32)
            known[architecture] = [
                model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt)),
                    max_new_tokens=NEW_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )[0, len(prompt) :].tolist()
                for prompt in make_prompts()
            ]
        return known[architecture]

    return answers


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(architecture, setting, device, tiny_model, reference, monkeypatch):
    few = "few pages" in setting
    if few:
        monkeypatch.setattr(Demand, "share", 0.0)  # admit without foresight, so that pages run out
    options = SETTINGS[setting]
    with LLM(str(tiny_model(architecture)), dtype="float32", device=device, **options) as llm:
        for again in (False, True):
            outs = llm.generate(make_prompts(), SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
            assert [o.outputs[0].token_ids for o in outs] == reference(architecture)
            llm._engine.scheduler.check()
            if again and not few and options.get("cache") != "none":
                assert sum(o.cached_tokens for o in outs) > 500
        stats = llm.stats()
        assert stats.running == stats.waiting == stats.pages_locked == 0
        assert (stats.retractions > 0) == few


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def llama(tiny_model, request):
    model = str(tiny_model("LlamaForCausalLM"))
    with LLM(model, dtype="float32", device=request.param, max_running_requests=8) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts_with_what_they_were_asked(llama):
    prompts = [[5], [6, 7], [8, 9, 10]]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 1, 2)]
    outs = llama.generate(prompts, params)
    assert [o.prompt_token_ids for o in outs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outs] == [3, 1, 2]
    assert {o.outputs[0].finish_reason for o in outs} == {"length"}
    assert outs[0].timing.ttft_s is not None and outs[0].timing.total_s >= outs[0].timing.ttft_s
    assert llama.generate([]) == []
    assert llama.generate([4, 5, 6], SamplingParams(max_tokens=1))[0].prompt_token_ids == [4, 5, 6]


def test_a_seeded_request_gets_its_tokens_whatever_runs_beside_it(llama):
    seeded = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=20, ignore_eos=True)
    alone = llama.generate([[9, 8, 7]], seeded)[0].outputs[0].token_ids
    others = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True) for n in (3, 30, 7, 20)]
    beside = llama.generate([[1] * 40, [2], [3] * 9, [4] * 3, [9, 8, 7]], [*others, seeded])[4]
    assert beside.outputs[0].token_ids == alone
    other = llama.generate([[9, 8, 7]], SamplingParams(temperature=0.9, seed=12, max_tokens=20, ignore_eos=True))
    assert other[0].outputs[0].token_ids != alone


def test_greedy_top_k_1_and_tiny_temperatures_agree(llama):
    rows = [{"temperature": 0}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1e-6}]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, **row) for row in rows]
    outs = llama.generate([[3, 4, 5]] * 3, params)
    assert len({tuple(o.outputs[0].token_ids) for o in outs}) == 1


def test_end_of_text_ends_a_request_unless_it_is_ignored_and_user_stop_ids_still_count(llama):
    free = llama.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    third = free.token_ids[2]
    stop = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop_token_ids=[third])
    out = llama.generate([[7, 7]], stop)[0].outputs[0]
    first = free.token_ids.index(third)
    assert out.token_ids == free.token_ids[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", third)


def test_end_of_text_is_the_union_of_config_and_generation_config(tiny_model, tmp_path):
    source = tiny_model("LlamaForCausalLM")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with LLM(str(tmp_path), dtype="float32", device="cpu") as llm:
        tokens = (
            llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
        )
    for name in ("config.json", "generation_config.json"):
        edited = json.loads((tmp_path / name).read_text()) | {"eos_token_id": [tokens[4], 2]}
        (tmp_path / name).write_text(json.dumps(edited))
        with LLM(str(tmp_path), dtype="float32", device="cpu") as llm:
            out = llm.generate([[7, 7]], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
        assert out.token_ids == tokens[: tokens.index(tokens[4]) + 1]
        assert (out.finish_reason, out.stop_reason) == ("stop", None)
        (tmp_path / name).write_bytes((source / name).read_bytes())


def test_without_max_tokens_a_request_goes_on_to_the_end_of_the_context(tiny_model):
    with LLM(str(tiny_model("LlamaForCausalLM")), device="cpu", max_model_len=50) as llm:
        out = llm.generate([[5] * 20], SamplingParams(ignore_eos=True))[0].outputs[0]
        assert len(out.token_ids) == 30 and out.finish_reason == "length"


@pytest.mark.parametrize("limits", [{"max_model_len": 64}, {"num_pages": 4}])
def test_prompts_around_the_context_limit(tiny_model, limits, caplog):
    with LLM(str(tiny_model("LlamaForCausalLM")), device="cpu", page_size=16, **limits) as llm:
        assert llm.max_model_len == 64
        greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        with caplog.at_level(logging.INFO, logger="minisgl"):
            assert len(llm.generate([[5] * 63], greedy)[0].outputs[0].token_ids) == 1
        assert "max_tokens 10 cut to 1" in caplog.text
        for length in (64, 65, 640):
            with pytest.raises(ValueError, match=rf"{length} tokens; the context holds 64"):
                llm.generate([[4], [5] * length], greedy)
        assert llm.stats().waiting == llm.stats().running == 0, "nothing was queued"
        assert len(llm.generate([[5] * 20], greedy)[0].outputs[0].token_ids) == 10


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "the prompt has no tokens"),
        ([[5, 320]], None, "token id 320 is not in the model's vocabulary of 320"),
        ([[-1]], None, "token id -1"),
        ([[1.5]], None, "must be text or token ids"),
        (["text"], None, "needs a tokenizer"),
        ([[5]], SamplingParams(stop="x"), "needs a tokenizer"),
        ([[5]], SamplingParams(stop_token_ids=[320]), "stop_token_ids: token id 320"),
        ([[5], [6]], [SamplingParams()], "2 prompts and 1 sampling_params"),
        ([[5]], {"temperature": 0}, "sampling_params must be"),
        ([[5]], [None], "sampling_params must be"),
        ([[5]], 5, "sampling_params must be"),
        (None, None, "prompts must be"),
        (5, None, "prompts must be"),
        (b"hello", None, "prompts must be"),
        ([b"hello"], None, "a prompt must be"),
        ([{5: 6}], None, "a prompt must be"),
        ([1, [2]], None, "a prompt must be"),
        (np.array(5), None, "prompts must be"),
        ([np.array(5)], None, "a prompt must be"),
        (iter([[5]]), None, "prompts must be"),
    ],
)
def test_wrong_input_is_a_clear_error_and_the_engine_goes_on(llama, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        llama.generate(prompts, params)
    assert llama.stats().waiting == 0
    assert llama.generate([[5]], SamplingParams(max_tokens=1))


def test_numpy_prompts_are_token_ids(llama):
    greedy = SamplingParams(temperature=0, max_tokens=2)
    want = llama.generate([[3, 4]], greedy)[0].outputs
    for prompts in (np.array([3, 4]), [np.int64(3), np.int32(4)], [np.array([3, 4])], (3, 4)):
        assert llama.generate(prompts, greedy)[0].outputs == want


def test_a_stream_that_the_garbage_collector_closes_within_a_step_ends_and_disturbs_nothing(llama, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = [p.token_ids for p in llama.stream([4, 5], greedy)]
    dropped = [llama.stream([8, 9], greedy)]
    next(dropped[0])
    launch = llama._engine.runner.launch

    def collect(batch):
        dropped.clear()  # as the collector would, in the middle of a step
        return launch(batch)

    monkeypatch.setattr(llama._engine.runner, "launch", collect)
    assert [p.token_ids for p in llama.stream([4, 5], greedy)] == want
    assert llama.stats().running == llama.stats().pages_locked == 0 and not llama._generations


def test_an_interrupt_between_step_and_hand_over_ends_what_ended_in_it(llama, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    first = llama.stream([4], greedy)
    second = llama.stream([5], greedy)
    next(first), next(second)
    take = llama._take_tokens

    def interrupted(committed):
        take(committed)
        if committed.ended:
            monkeypatch.setattr(llama, "_take_tokens", take)
            raise KeyboardInterrupt

    monkeypatch.setattr(llama, "_take_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(first)
    assert list(second)[-1].output is not None
    assert not llama._generations and llama.stats().pages_locked == 0


def test_the_decode_rate_is_between_first_and_last_token(llama, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("minisgl.llm.time.monotonic", lambda: float(next(clock)))
    timing = llama.generate([[4, 5]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0].timing
    steps = 4 / timing.decode_tokens_per_s
    assert steps == int(steps) and 4 <= steps <= 8, "the clock moves once a step, and once where a request ends"


def test_streamed_tokens_are_those_of_generate_and_leaving_aborts(llama):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    whole = llama.generate([[4, 5]], greedy)[0].outputs[0]
    pieces = list(llama.stream([4, 5], greedy))
    assert [t for p in pieces for t in p.token_ids] == whole.token_ids
    assert pieces[-1].output is not None and pieces[-1].output.outputs[0] == whole
    stream = llama.stream([4, 5], greedy)
    next(stream)
    assert llama.stats().running == 1
    stream.close()
    assert llama.stats().running == llama.stats().pages_locked == 0


def test_streams_and_generate_may_be_interleaved(llama):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = [o.outputs[0].token_ids for o in llama.generate([[4], [5], [6]], greedy)]
    first, second = llama.stream([4], greedy), llama.stream([5], greedy)
    got: list[list[int]] = [[], []]
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    assert llama.generate([[6]], greedy)[0].outputs[0].token_ids == want[2]
    got[1] += [t for p in second for t in p.token_ids]
    got[0] += [t for p in first for t in p.token_ids]
    assert got == want[:2]


def test_an_interrupt_aborts_what_runs_and_the_next_call_is_right(llama, monkeypatch):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = llama.generate([[4, 5]], greedy)[0].outputs[0].token_ids
    launch, calls = llama._engine.runner.launch, []

    def interrupted(batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return launch(batch)

    monkeypatch.setattr(llama._engine.runner, "launch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llama.generate([[i, i + 1] for i in range(3, 30)], greedy)
    assert llama.stats().running == llama.stats().waiting == llama.stats().pages_locked == 0
    assert llama.generate([[4, 5]], greedy)[0].outputs[0].token_ids == want


def test_thousands_of_prompts_wait_outside_the_engine(llama):
    waiting = []
    step = llama._engine.step

    def watched():
        waiting.append(llama.stats().waiting)
        return step()

    llama._engine.step = watched
    outs = llama.generate([[3 + i % 300] for i in range(2000)], SamplingParams(max_tokens=1, temperature=0))
    assert [o.prompt_token_ids for o in outs] == [[3 + i % 300] for i in range(2000)]
    assert max(waiting) <= 2 * 8


def test_fed_prompts_are_taken_as_there_is_room_and_each_is_told_when_it_ends(llama):
    taken, told = [], []

    def prompts():
        for number in range(200):
            taken.append(number)
            yield [3 + number], SamplingParams(max_tokens=1 + number % 7, temperature=0, ignore_eos=True)

    for ended in llama.feed(prompts()):
        told += ended
        assert len(taken) - len(told) <= 3 * 8, "those that run, and those that wait for them"
        assert len(taken) - len(told) >= 8 or len(taken) == 200, "it never runs dry before the end"
    assert sorted(number for number, _ in told) == taken == list(range(200))
    for number, output in told:
        assert output.prompt_token_ids == [3 + number] and len(output.outputs[0].token_ids) == 1 + number % 7
    assert llama.generated_tokens == sum(1 + number % 7 for number in range(200))


def test_leaving_a_feed_aborts_and_a_prompt_that_cannot_run_ends_it(llama):
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    feed = llama.feed(([token], greedy) for token in range(3, 300))
    next(feed)
    assert llama.stats().running > 0
    feed.close()
    assert llama.stats().running == llama.stats().waiting == llama.stats().pages_locked == 0
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        list(llama.feed([([5], greedy), ([], greedy)]))
    assert llama.stats().running == llama.stats().waiting == 0 and not llama._generations


@pytest.mark.parametrize("inner", ["generate", "stream", "feed"])
def test_other_work_in_the_middle_of_a_call_loses_no_result_of_it(llama, inner):
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    want = {token: llama.generate([[token]], greedy)[0].outputs[0].token_ids for token in range(3, 33)}
    extra = []

    def more(number, output):
        if inner == "generate":
            extra.append(llama.generate([[20]], greedy)[0])
        elif inner == "stream":
            extra.append(list(llama.stream([20], greedy))[-1].output)
        else:
            extra.extend(result for ended in llama.feed([([20], greedy)]) for _, result in ended)

    outs = llama.generate([[token] for token in range(3, 33)], greedy, on_finished=more)
    assert [o.outputs[0].token_ids for o in outs] == list(want.values())
    assert [o.outputs[0].token_ids for o in extra] == [want[20]] * 30


def test_an_abort_of_all_ends_those_too_that_wait_outside_the_engine(llama):
    greedy = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    told = []

    def abort_once(number, output):
        if not told:
            llama.abort()
        told.append(number)

    steps = llama.stats().steps
    asked = [SamplingParams(max_tokens=1)] + [greedy] * 199
    outs = llama.generate([[token] for token in range(3, 203)], asked, on_finished=abort_once)
    assert [o.outputs[0].finish_reason for o in outs] == ["length"] + ["abort"] * 199
    assert sorted(told) == list(range(200)) and llama.stats().steps - steps < 30
    assert llama.generate([[5]], greedy)[0].outputs[0].finish_reason == "length"


def test_dummy_weights_need_only_a_config(tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model("Qwen3ForCausalLM") / "config.json").read_bytes())
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = []
    for _ in range(2):
        with LLM(str(tmp_path), load_format="dummy", device="cpu") as llm:
            out = llm.generate([[5, 6, 7]], greedy)[0]
            tokens.append(out.outputs[0].token_ids)
            assert out.text == ""
    assert tokens[0] == tokens[1]


def test_close_is_idempotent_and_what_comes_after_says_so(tiny_model):
    llm = LLM(str(tiny_model("LlamaForCausalLM")), device="cpu")
    with llm:
        pass
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[5]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 2, "node_rank": 1}, "node_rank=1: it must be less than nnodes=1"),
        ({"attention_backend": "flashinfer"}, "flashinfer cannot do prefill here: flashinfer"),
        ({"attention_backend": "flash"}, "flash cannot do prefill here: flash"),
        ({"attention_backend": "reference,flash"}, "flash is for prefill: name another backend for decode"),
        ({"attention_backend": "xformers"}, "'xformers' is none of auto, reference, flashinfer, flash, triton"),
        ({"cuda_graph": True}, "the device is a CPU"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_fetched(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("no-such-org/no-such-model", device="cpu", **options)


@pytest.mark.parametrize("name", ["auto,reference,auto", ","])
def test_more_than_two_backends_or_none_is_refused(name):
    with pytest.raises(ValueError, match="attention_backend"):
        LLM("no-such-org/no-such-model", attention_backend=name)


def test_more_running_requests_than_memory_holds_is_one_line(tiny_model):
    with pytest.raises(ValueError, match="no memory for 60000 running requests: lower --max-running-requests"):
        LLM(_long(tiny_model), device="cpu", max_running_requests=60_000, num_pages=70_000_000, page_size=1)


def _long(tiny_model):
    return str(tiny_model("LlamaForCausalLM", max_position_embeddings=2**26, num_hidden_layers=1, head_dim=2))


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(tiny_model):
    with pytest.raises(ValueError, match=r"max_model_len=4096.*at most 2048"):
        LLM(str(tiny_model("LlamaForCausalLM")), device="cpu", max_model_len=4096)


def test_the_configuration_in_force_is_concrete(tiny_model):
    with LLM.from_config(EngineConfig(model=str(tiny_model("LlamaForCausalLM")))) as llm:
        assert llm.config.device in ("cpu", "cuda") and llm.config.dtype != "auto"
        assert llm.config.page_size and "auto" not in llm.config.attention_backend
        assert llm.config.cuda_graph is bool(llm.config.cuda_graph_bs)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (1, 8, 16, 24, 30)),
        ({"cuda_graph_max_bs": 5}, (1, 5)),
        ({"cuda_graph_bs": [7, 3, 64]}, (3, 7)),
        ({"cuda_graph_bs": [7, 3, 9], "cuda_graph_max_bs": 8}, (3, 7)),
        ({"cuda_graph": False}, ()),
        ({"cuda_graph_max_bs": 0}, ()),
    ],
)
def test_graphs_are_as_large_as_asked_and_no_larger_than_the_running_requests(options, sizes, monkeypatch):
    """What a CUDA device would get."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    options = {"cuda_graph": True, **options} if sizes else options
    config = resolve(EngineConfig(max_running_requests=30, **options))
    resolved = resolve_kernels(config, read_model_config(MODELS / "qwen3-0.6b"))
    assert (resolved.cuda_graph_bs, resolved.cuda_graph_max_bs) == (sizes, max(sizes, default=0))


def test_graphs_that_are_asked_for_and_ruled_out_are_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"cuda_graph_max_bs=0, .* leave none"):
        resolve(EngineConfig(cuda_graph=True, cuda_graph_max_bs=0))


def test_bfloat16_runs_too(tiny_model):
    with LLM(str(tiny_model("Qwen3ForCausalLM")), dtype="bfloat16", device="cpu") as llm:
        out = llm.generate([[5] * 30, [6]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert all(len(o.outputs[0].token_ids) == 8 for o in out)
        assert np.isfinite(out[0].timing.total_s)
