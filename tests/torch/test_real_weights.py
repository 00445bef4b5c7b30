"""Token equality with transformers on the real SmolLM2 weights; `--equality-full` runs every setting."""

from pathlib import Path

import pytest
import torch
import transformers

from minisgl import LLM, SamplingParams
from minisgl.scheduler.scheduler import Demand
from minisgl.source.hub import locate

pytestmark = pytest.mark.real_model

LENGTHS = [2000, 63, 64, 65, 1, 2, 3, 5, 9, 15, 16, 17, 31, 33, 100, 128, 200, 333, 512, 1000]
NEW_TOKENS = 32
FEW = 2176  # tokens in the pool: the longest prompt fits with two others, but not with all of their answers

SELECTED = {
    "chunks of 64, few pages": {"overlap": True, "chunked_prefill_size": 64, "page_size": 16, "num_pages": FEW // 16},
    "separate, no overlap, page size 1": {"mixed_batch": False, "overlap": False, "page_size": 1},
}
FULL = {
    f"chunk {chunk}, page size {page_size}, {'few pages' if few else 'all pages'}, overlap {overlap}, mixed {mixed}": {
        "chunked_prefill_size": chunk,
        "page_size": page_size,
        "overlap": overlap,
        "mixed_batch": mixed,
        **({"num_pages": FEW // page_size} if few else {}),
    }
    for chunk, few in ((64, True), (8192, False))
    for page_size in (1, 16, 64)
    for overlap in (True, False)
    for mixed in (True, False)
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setting" in metafunc.fixturenames:
        settings = FULL if metafunc.config.getoption("--equality-full") else SELECTED
        metafunc.parametrize("setting", settings.values(), ids=settings.keys())


@pytest.fixture(scope="module")
def folder() -> Path:
    return locate("smollm2").path


@pytest.fixture(scope="module")
def prompts(folder) -> list[list[int]]:
    """Real text, each prompt from another place in it."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    root = Path(__file__).parents[2]
    text = "".join((root / name).read_text() for name in ("LICENSE", "docs/architecture.md", "minisgl/cache/radix.py"))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 4000
    starts = [37 * i for i in range(len(LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def confirm(folder, prompts):
    """`confirm(answers)`: each is what transformers goes on with greedily in float32, end-of-text included.

    It is asked for all of an answer at once: if each token is the likeliest behind those before it, so is the whole.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = {}

    def check(answers):
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if known.get(number) != answer:
                with torch.inference_mode():
                    scores = model(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits[0, :-1]
                assert answer == scores.argmax(dim=-1).tolist(), f"prompt {number}"
                end = model.config.eos_token_id
                assert end not in answer[:-1] and (len(answer) == NEW_TOKENS or answer[-1] == end)
                known[number] = answer

    return check


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_tokens_equal_transformers_run_together_and_twice(setting, device, prompts, confirm, monkeypatch):
    few = "num_pages" in setting
    if few:
        monkeypatch.setattr(Demand, "share", 0.0)  # admit without foresight, so that pages run out
    graphs = {"cuda_graph": device == "cuda", "cuda_graph_max_bs": 32}
    with LLM("smollm2", dtype="float32", device=device, **graphs, **setting) as llm:
        for again in (False, True):
            outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
            confirm([o.outputs[0].token_ids for o in outs])
            llm._engine.scheduler.check()
            if again and not few:
                assert sum(o.cached_tokens for o in outs) > 4000
        assert (llm.stats().retractions > 0) == few


def test_the_capital_of_france(folder):
    with LLM("smollm2", device="cpu") as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
        out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32))[0]
        assert "Paris" in out.text and out.text.endswith(".")
        assert out.outputs[0].finish_reason == "stop"


def test_a_stop_string_cuts_text_and_ids(folder):
    with LLM("smollm2", device="cpu") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=40)
        prompt = llm.chat_prompt([{"role": "user", "content": "Count from one to ten in words."}])
        whole = llm.generate([prompt], greedy)[0]
        stop = whole.text[len(whole.text) // 2 :][:3]
        cut = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=40, stop=[stop, "never there"]))[0]
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
        ids = cut.outputs[0].token_ids
        assert ids == whole.outputs[0].token_ids[: len(ids)]
        assert stop in llm.tokenizer.decode(ids) and stop not in llm.tokenizer.decode(ids[:-1])
        pieces = list(llm.stream(prompt, SamplingParams(temperature=0, max_tokens=40, stop=stop)))
        assert "".join(p.text for p in pieces) == cut.text
