"""CUDA graphs, and all settings that must change nothing."""

import random
import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.engine import Engine
from minisgl.generation import NEUTRAL
from minisgl.request import Request

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"vocab_size": 1000, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def tokens(llm: LLM, prompts, params=GREEDY):
    return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]


def some_prompts(count, shortest=1, longest=90, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def test_graphs_of_every_batch_size_equal_eager_in_float32(qwen3):
    """Up to one more than the largest graph, so that every padding and the way without a graph are among them."""
    fields = {
        "load_format": "dummy", "dtype": "float32", "max_model_len": 128, "num_pages": 200, "cuda_graph_max_bs": 12
    }  # fmt: skip
    folder = qwen3(**SMALL)
    got = []
    for graphs in (True, False):
        with LLM(folder, cuda_graph=graphs, **fields) as llm:
            assert llm.config.cuda_graph_bs == ((1, 8, 12) if graphs else ())
            got.append([tokens(llm, some_prompts(n, seed=n)) for n in range(1, 14)])
    assert got[0] == got[1]


@pytest.mark.parametrize(
    ("page_size", "backend"),
    [(1, "auto"), (64, "flashinfer"), (64, "flashinfer,triton")],
    ids=["planned on the host", "XQA", "our kernel"],
)
def test_log_probabilities_of_graphs_are_those_of_eager_in_bfloat16(qwen3, page_size, backend):
    """Of the first token that a decode step draws; page size 1 runs FlashInfer's own decode kernel."""
    params = replace(GREEDY, max_tokens=2, logprobs=20)
    folder = qwen3()
    seen = []
    for graphs in (True, False):
        fields = {"max_model_len": 2048, "num_pages": 64_000 // page_size, "page_size": page_size, "cache": "none"}
        fields["attention_backend"] = backend
        with LLM(folder, load_format="dummy", cuda_graph=graphs, cuda_graph_max_bs=12, **fields) as llm:
            outs = [out for n in (*range(1, 14),) for out in llm.generate(some_prompts(n, 1, 900, seed=n), params)]
        seen.append([out.outputs[0] for out in outs])
    for graph, eager in zip(*seen, strict=True):
        assert graph.token_ids[0] == eager.token_ids[0]
        ours, theirs = graph.logprobs[1].top, eager.logprobs[1].top
        common = ours.keys() & theirs.keys()
        assert len(common) >= 15
        assert max(abs(ours[t] - theirs[t]) for t in common) < 0.04  # logits between 4 and 8 are rounded to 1 / 32


def test_settings_change_nothing_in_float32(qwen3):
    prompts = some_prompts(24, 10, 120)
    prompts += [[*p, 7, 8, 9] for p in prompts[:8]]  # shared prefixes
    fields = {"load_format": "dummy", "dtype": "float32", "max_model_len": 512}
    folder = qwen3(**SMALL)
    layouts = [(True, 8192, 2000), (True, 100, 65), (False, 64, 60), (False, 8192, 2000)]  # mixed, chunk, pages
    got = {}
    for number, (overlap, graphs, cache) in enumerate(product((True, False), (True, False), ("radix", "none"))):
        for mixed, chunk, pages in (layouts[number % 2 + 1], layouts[number % 2 * 3]):
            setting = {
                "overlap": overlap, "cuda_graph": graphs, "cache": cache, "mixed_batch": mixed,
                "chunked_prefill_size": chunk, "num_pages": pages, "cuda_graph_bs": [4, 16] if graphs else None,
            }  # fmt: skip
            with LLM(folder, **fields, **setting) as llm:
                got[str(setting)] = tokens(llm, prompts, replace(GREEDY, max_tokens=100))
                if pages < 100:
                    assert llm.stats().retractions > 0
    expected = next(iter(got.values()))
    assert [setting for setting, tokens in got.items() if tokens != expected] == []


def test_an_answer_is_drawn_alike_alone_and_among_others_and_in_a_graph(qwen3):
    folder, prompts = qwen3(**SMALL), some_prompts(9)
    params = [replace(GREEDY, temperature=0.9, seed=i, top_p=0.9 if i % 3 == 1 else None) for i in range(9)]
    fields = {"load_format": "dummy", "dtype": "float32", "max_model_len": 128, "num_pages": 200}
    got = []
    for graphs in (True, False):
        with LLM(folder, cuda_graph=graphs, cuda_graph_max_bs=8, **fields) as llm:
            got.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
            got.append([llm.generate(p, q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)])
    assert got[1:] == got[:1] * 3


def new_request(rng: random.Random, key: int, prefixes) -> Request:
    prompt = [*rng.choice(prefixes)[: rng.randint(0, 300)], *(rng.randrange(1000) for _ in range(rng.randint(1, 80)))]
    params = SamplingParams(temperature=rng.choice([0.0, 1.0]), top_p=rng.choice([1.0, 0.9]), logprobs=0)
    return Request(
        key=key,
        prompt=np.array(prompt, np.int32),
        max_tokens=rng.randint(300, 600),
        sampling=params.with_defaults(NEUTRAL),
        stop_ids=(rng.randrange(1000),),
        seed=key,
        arrival_s=0.0,
    )


@pytest.mark.parametrize("page_size", [1, 64], ids=["planned on the host", "without a plan"])
def test_requests_that_share_pages_run_in_graphs(qwen3, page_size):
    """Each lists the shared pages as its own: together more than the pool has."""
    prefix, params = some_prompts(1, 400, 400)[0], replace(GREEDY, max_tokens=20)
    fields = {"max_model_len": 512, "num_pages": 1024 // page_size, "page_size": page_size, "max_running_requests": 16}
    with LLM(qwen3(**SMALL), load_format="dummy", **fields) as llm:
        llm.generate([prefix], params)
        outs = llm.generate([[*prefix, i] for i in range(16)], params)
        assert all(len(out.outputs[0].token_ids) == 20 and out.cached_tokens >= 384 for out in outs)


def test_no_step_waits_for_the_device(qwen3):
    """Decode, prompts, both, filters, planned decode: the host launches and goes on."""
    params = [replace(GREEDY, temperature=1.0, top_p=[None, 0.9][i % 2]) for i in range(6)]
    for page_size in (1, 64):
        with LLM(qwen3(**SMALL), load_format="dummy", max_model_len=512, num_pages=8192, page_size=page_size) as llm:
            llm.generate(some_prompts(6, 10, 300), params)
            launch = llm._engine.runner.launch

            def checked(batch, launch=launch):
                with warnings.catch_warnings(action="ignore"):  # it calls itself a prototype
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    return launch(batch)
                finally:
                    torch.cuda.set_sync_debug_mode("default")

            llm._engine.runner.launch = checked
            llm.generate(some_prompts(6, 10, 300, seed=1), params)


def test_a_soak_of_2000_requests_under_a_small_pool(qwen3):
    rng = random.Random(0)
    prefixes = some_prompts(5, 300, 300)
    fields = {"max_model_len": 1024, "num_pages": 300, "max_running_requests": 64, "chunked_prefill_size": 512}
    folder, logprobs = qwen3(**SMALL), defaultdict(list)
    with LLM(folder, load_format="dummy", **fields) as llm:
        engine: Engine = llm._engine
        requests = [new_request(rng, key, prefixes) for key in range(2000)]
        waiting, added, ended, drawn = list(requests), [], [], 0
        while waiting or engine.has_work:
            while waiting and engine.num_waiting < 60:
                added.append(waiting.pop())
                engine.add(added[-1])
            committed = engine.step()
            drawn += len(committed.keys)
            ended += committed.ended
            if committed.logprobs is not None:
                for key, score in zip(committed.logprob_keys.tolist(), committed.logprobs.chosen.tolist(), strict=True):
                    logprobs[key].append(score)
            if rng.random() < 0.05:
                engine.finish(rng.choice(added[-200:]), "abort")
            if rng.random() < 0.02:
                engine.scheduler.check()
        engine.scheduler.check()
        stats = engine.stats()
        assert stats.retractions > 0 and stats.prefix_hit_tokens > 0
        assert (stats.running, stats.waiting, stats.pages_locked) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == 300
        said = [r for r in ended if r.finish_reason != "abort"][:: len(ended) // 40]
        texts = [[*r.prompt.tolist(), *r.output.tolist()] for r in said]
    # What was drawn step by step, from cached, retracted and recycled pages, must be likely when it is read at once.
    with LLM(folder, load_format="dummy", max_model_len=1024, cache="none", max_running_requests=1) as llm:
        scored = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
    for request, output in zip(said, scored, strict=True):
        assert output.prompt_logprobs is not None
        again = [each.logprob for each in output.prompt_logprobs[len(request.prompt) :] if each is not None]
        assert len(again) == len(request.output)
        assert np.abs(np.array(again) - logprobs[request.key]).max() < 0.1
    assert sorted(r.key for r in ended) == list(range(2000))
    assert {r.finish_reason for r in ended} == {"stop", "length", "abort"}
    assert drawn == sum(len(r.output) for r in ended)
    torch.cuda.synchronize()
