"""Several ranks say what one says. They meet and talk as processes do, but are threads here, which start at once."""

import math
import threading
import traceback

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.parallel import crew
from minisgl.runtime.rank import work
from minisgl.scheduler.scheduler import Demand

ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
THIRDS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}  # of heads, that is
PROMPTS = [[3 + (5 * i + j * j) % 300 for j in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 40, 70, 5))]
PROMPTS += [[*PROMPTS[6][:40], 9, i] for i in range(3, 6)]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


class RankThread:
    """A rank as the crew sees a process."""

    def __init__(self, task, words):
        self.pid, self.returncode, self._task, self._words = 0, None, task, words
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            work(self._task)
            self.returncode = 0
        except BaseException:
            self._words.write(traceback.format_exc().encode())
            self._words.flush()
            self.returncode = 1

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._thread.join(timeout)

    def kill(self):
        """No thread can be; those here end with their connections."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setattr(crew, "_start", RankThread)


def answers(model, prompts, params, again=False, **fields):
    """The answers of an engine on a CPU, and what it counts; `again` asks twice and checks that it says the same."""
    fields = {"dtype": "float32", "device": "cpu", "max_model_len": 512, **fields}
    with LLM(str(model), **fields) as llm:
        outs = llm.generate(prompts, params)
        if again:
            twice = llm.generate(prompts, params)
            assert [out.outputs[0].token_ids for out in twice] == [out.outputs[0].token_ids for out in outs]
            assert sum(out.cached_tokens for out in twice) > 100
        llm._engine.scheduler.check()
        return outs, llm.stats()


def tokens(*arguments, **fields):
    return [answer.token_ids for out in answers(*arguments, **fields)[0] for answer in out.outputs]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_one_rank(architecture, size, tiny_model):
    """Twice, so that the second time prefixes are cached; the vocabulary can't be parted evenly."""
    model = tiny_model(architecture, vocab_size=321, **(THIRDS if size == 3 else {}))
    fields = {"chunked_prefill_size": 50, "overlap": architecture == "LlamaForCausalLM"}
    assert tokens(model, PROMPTS, GREEDY, tp=size, again=True, **fields) == tokens(model, PROMPTS, GREEDY)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 1, 2), (6, 1, 3), (4, 2, 4), (8, 2, 8)])
def test_key_heads_that_are_fewer_than_ranks_are_shared(heads, kv_heads, size, tiny_model):
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    model = tiny_model("Qwen3ForCausalLM", **shape, vocab_size=331)
    assert tokens(model, PROMPTS[:6], GREEDY, tp=size) == tokens(model, PROMPTS[:6], GREEDY)


def test_biases_are_added_once_and_tied_embeddings_are_parted_once(tiny_model):
    shape = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    model = tiny_model("LlamaForCausalLM", **shape)
    assert tokens(model, PROMPTS[:4], GREEDY, tp=2) == tokens(model, PROMPTS[:4], GREEDY)


@pytest.mark.parametrize("size", [2, 3])
def test_draws_edits_and_filters_are_those_of_one_rank(size, tiny_model):
    model = tiny_model("LlamaForCausalLM", vocab_size=9001, **(THIRDS if size == 3 else {}))
    asked = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.8, "repetition_penalty": 1.3},
        {"logit_bias": {8999: 100.0, 4000: 99.0}},  # in the last part of the vocabulary, and in another
        {"min_tokens": 5, "stop_token_ids": list(range(0, 9001, 2)), "temperature": 0.5},
    ]
    params = [SamplingParams(seed=i, max_tokens=10, **{"temperature": 0, **one}) for i, one in enumerate(asked)]
    assert tokens(model, PROMPTS[:7], params, tp=size) == tokens(model, PROMPTS[:7], params)


def test_log_probabilities_are_those_of_one_rank(tiny_model):
    model = tiny_model("Qwen2ForCausalLM", vocab_size=321)
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=4, prompt_logprobs=3)
    (alone, _), (parted, _) = (answers(model, PROMPTS[2:7], params, tp=size) for size in (1, 2))
    for one, other in zip(alone, parted, strict=True):
        for mine, its in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert list(mine.top) == list(its.top) and mine.token_id == its.token_id
            assert math.isclose(mine.logprob, its.logprob, abs_tol=1e-4)
        for mine, its in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert list(mine.top) == list(its.top)
            assert math.isclose(mine.logprob, its.logprob, abs_tol=1e-4)


@pytest.mark.parametrize("size", [2, 3])
def test_retracted_requests_go_on_as_on_one_rank(size, tiny_model, monkeypatch):
    monkeypatch.setattr(Demand, "share", 0.0)  # admit without foresight, so that pages run out
    model = tiny_model("Qwen3ForCausalLM", **(THIRDS if size == 3 else {}))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    few = {"num_pages": 14, "chunked_prefill_size": 16, "overlap": True}
    outs, stats = answers(model, PROMPTS, params, tp=size, **few)
    assert stats.retractions > 0
    assert [out.outputs[0].token_ids for out in outs] == tokens(model, PROMPTS, params)


def test_aborted_requests_leave_ranks_that_agree(tiny_model):
    model = tiny_model("LlamaForCausalLM")
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with LLM(str(model), dtype="float32", device="cpu", tp=2, max_model_len=512) as llm:
        for piece in llm.stream(PROMPTS[5], long):
            if len(piece.text or "x"):
                break  # which aborts it
        llm.generate(PROMPTS[:4], long, on_finished=lambda *_: llm.abort())
        assert [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY)] == tokens(model, PROMPTS, GREEDY)
        llm._engine.scheduler.check()


def test_bfloat16_shards_are_packed_where_their_shape_allows(tiny_model):
    """In bfloat16 tokens may differ, the likeliest one's log-probability little."""
    model = tiny_model("LlamaForCausalLM", vocab_size=321)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (alone, _), (parted, _) = (answers(model, PROMPTS[5:7], params, tp=n, dtype="bfloat16") for n in (1, 2))
    scores = [[max(at.top.values()) for out in outs for at in out.prompt_logprobs[1:]] for outs in (alone, parted)]
    assert (torch.tensor(scores[0]) - torch.tensor(scores[1])).abs().mean() < 0.05


def test_the_same_random_weights_whatever_the_number_of_ranks(tiny_model):
    model = tiny_model("Qwen3ForCausalLM", vocab_size=321)
    alone, parted = (tokens(model, PROMPTS[:5], GREEDY, load_format="dummy", tp=size) for size in (1, 2))
    assert parted == alone


def test_a_failed_rank_ends_the_engine_with_its_last_words(tiny_model, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of something")

    model = tiny_model("LlamaForCausalLM")
    with LLM(str(model), dtype="float32", device="cpu", tp=2, max_model_len=512) as llm:
        monkeypatch.setattr("minisgl.parallel.leader.receive", fail)  # from the next but one batch on
        for _ in range(2):
            with pytest.raises(ChildProcessError, match=r"rank 1 \(pid 0\) ended with exit code 1: .*out of something"):
                llm.generate(PROMPTS[:2], GREEDY)
        assert llm.stats().running == 0


@pytest.mark.real_model
def test_smollm2_on_three_ranks_says_what_it_says_on_one():
    texts = ["The capital of France is", "def fibonacci(n):", "Once upon a time there was a"]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=16) for t in (0, 0, 0.8)]
    alone, parted = (tokens("smollm2", texts, params, tp=size) for size in (1, 3))
    assert parted == alone
