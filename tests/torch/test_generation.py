"""What a user of the offline engine asks for beyond plain tokens, on tiny models against transformers' own logits."""

import json
import random

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from made_tokenizers import bytes_alone
from tokenizers import decoders, models, pre_tokenizers

from minisgl import LLM, SamplingParams
from minisgl.generation import derived_seed
from minisgl.openai.batch import answer_rows
from minisgl.scheduler.scheduler import Demand

ALPHABET = "abcdefghijklmnopqrstuvwxyz .!?\n0123456789"


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory):
    """A tiny model whose tokens are characters, with a chat template."""
    made = tmp_path_factory.mktemp("letters")
    for file in tiny_model("LlamaForCausalLM").iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    bytes_alone().save(str(made / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% endfor %}"
    (made / "chat_template.jinja").write_text(template)
    return made


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def llm(folder):
    with LLM(str(folder), dtype="float32", device="cpu", max_running_requests=8) as made:
        yield made


def params(**fields):
    return SamplingParams(**{"temperature": 0, "max_tokens": 12, "ignore_eos": True} | fields)


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def scored(reference, tokens):
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_logprobs_are_the_models_own_for_the_chosen_and_the_likeliest(llm, reference):
    prompt = prompt_of(20)
    asked = [params(logprobs=3), params(logprobs=0, temperature=1.0, seed=4, logit_bias={5: 50}), params()]
    first, biased, without = llm.generate([prompt] * 3, asked)
    for out, count in ((first, 3), (biased, 0)):
        answer = out.outputs[0]
        scores = scored(reference, prompt + answer.token_ids)
        assert answer.logprobs is not None and [x.token_id for x in answer.logprobs] == answer.token_ids
        for at, entry in enumerate(answer.logprobs):
            row = scores[len(prompt) + at - 1]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert list(entry.top) == row.topk(count).indices.tolist()
            assert list(entry.top.values()) == pytest.approx(row.topk(count).values.tolist(), abs=1e-4)
    assert set(biased.outputs[0].token_ids) == {5}, "the bias decides, and is not in the log-probabilities"
    assert without.outputs[0].logprobs is None


@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 7}, {"overlap": False}])
def test_prompt_logprobs_are_the_models_own_also_in_chunks_and_with_a_cached_prefix(folder, reference, options):
    prompt = prompt_of(300)
    scores = scored(reference, prompt)
    with LLM(str(folder), dtype="float32", device="cpu", **options) as llm:
        llm.generate([prompt], params())
        out, plain = llm.generate([prompt] * 2, [params(prompt_logprobs=2), params()])
        assert (out.cached_tokens, plain.cached_tokens) == (0, 288)
        assert out.outputs[0].token_ids == plain.outputs[0].token_ids and plain.prompt_logprobs is None
        assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == 300 and out.prompt_logprobs[0] is None
        for at, entry in enumerate(out.prompt_logprobs[1:], start=1):
            assert entry is not None and entry.token_id == prompt[at]
            assert entry.logprob == pytest.approx(float(scores[at - 1, prompt[at]]), abs=1e-4)
            assert list(entry.top) == scores[at - 1].topk(2).indices.tolist()
        assert llm.generate([[5]], params(prompt_logprobs=1))[0].prompt_logprobs == [None]


def stepwise(reference, prompt, change, count=12):
    """Greedy tokens where `change(logits, tokens)` edits each step's logits."""
    tokens = list(prompt)
    for _ in range(count):
        logits = scored(reference, tokens)[-1].clone()
        tokens.append(int(change(logits, tokens).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("few_pages", [False, True])
def test_penalties_biases_and_bans_hold_at_every_step_also_after_a_retraction(
    folder, reference, few_pages, monkeypatch
):
    prompts = [prompt_of(n, seed=n) for n in (5, 30, 40, 50, 60)]

    def repetition(logits, tokens):
        raw = reference(torch.tensor([tokens])).logits[0, -1]
        said = torch.tensor(sorted(set(tokens)))
        return raw.index_copy(0, said, torch.where(raw[said] > 0, raw[said] / 1.5, raw[said] * 1.5))

    def both(prompt):
        def change(logits, tokens):
            counts = torch.bincount(torch.tensor(tokens[len(prompt) :], dtype=torch.long), minlength=len(logits))
            return logits - 0.7 * counts - 0.9 * (counts > 0)

        return change

    def no_word(prompt):
        def change(logits, tokens):
            logits[7] = -torch.inf
            return logits

        return change

    asked = [
        params(repetition_penalty=1.5),
        params(frequency_penalty=0.7, presence_penalty=0.9),
        params(logit_bias={9: 2.0, 11: -100.0}),
        params(min_tokens=10, ignore_eos=False, stop_token_ids=list(range(0, 320, 2))),
        params(repetition_penalty=1.5, max_tokens=12),
    ]
    bias = torch.zeros(320)
    bias[9], bias[11] = 2.0, -100.0
    odd = torch.zeros(320)
    odd[::2] = -torch.inf
    want = [
        stepwise(reference, prompts[0], repetition),
        stepwise(reference, prompts[1], both(prompts[1])),
        stepwise(reference, prompts[2], lambda logits, tokens: logits + bias),
        stepwise(reference, prompts[3], lambda logits, tokens: logits + odd, count=10),
        stepwise(reference, prompts[4], repetition),
    ]
    if few_pages:
        monkeypatch.setattr(Demand, "share", 0.0)
    options = {"num_pages": 14} if few_pages else {}
    with LLM(str(folder), dtype="float32", device="cpu", **options) as llm:
        got = [o.outputs[0].token_ids for o in llm.generate(prompts, asked)]
        assert got[:3] == want[:3] and got[4] == want[4]
        assert got[3][:10] == want[3]
        assert (llm.stats().retractions > 0) == few_pages


def test_bad_words_do_not_appear(llm):
    letters = dict.fromkeys(llm.tokenize(ALPHABET), 50.0)
    free = llm.generate(["hello"], params(max_tokens=40, logit_bias=letters))[0]
    words = [free.text[4:6], free.text[10]]
    out = llm.generate(["hello"], params(max_tokens=40, logit_bias=letters, bad_words=words))[0]
    assert len(free.text) == len(out.text) == 40
    assert all(word in free.text and word not in out.text for word in words)


def test_n_answers_share_the_prompt_and_each_has_the_seed_that_is_derived_for_it(llm):
    prompt = prompt_of(100)
    out = llm.generate([prompt], params(n=3, temperature=1.0, seed=9))[0]
    assert [a.index for a in out.outputs] == [0, 1, 2]
    assert len({tuple(a.token_ids) for a in out.outputs}) == 3
    stats = llm.stats()
    assert stats.prefix_hit_tokens == 2 * 96, "the siblings found the first one's prompt"
    for answer in out.outputs:
        seed = derived_seed(9, answer.index)
        alone = llm.generate([prompt], params(temperature=1.0, seed=seed))[0].outputs[0]
        assert alone.token_ids == answer.token_ids
    assert derived_seed(9, 0) == 9
    assert out.timing.decode_tokens_per_s is not None


def test_n_with_few_slots_and_pages_still_answers_all(folder):
    with LLM(str(folder), dtype="float32", device="cpu", max_running_requests=2, num_pages=12) as llm:
        outs = llm.generate([prompt_of(60), prompt_of(20)], params(n=5, temperature=1.0))
        assert [len(o.outputs) for o in outs] == [5, 5]
        assert all(len(a.token_ids) == 12 for o in outs for a in o.outputs)
        assert llm.stats().pages_locked == 0


def test_streamed_pieces_of_n_answers_are_their_texts(llm):
    pieces = list(llm.stream("hello", params(n=2, temperature=1.0, seed=1)))
    output = pieces[-1].output
    assert output is not None and sum(p.finished for p in pieces) == 1
    for answer in output.outputs:
        own = [p for p in pieces if p.index == answer.index]
        assert "".join(p.text for p in own) == answer.text
        assert [t for p in own for t in p.token_ids] == answer.token_ids


def test_a_stop_string_is_shown_when_asked_and_not_looked_for_within_min_tokens(llm):
    letters = dict.fromkeys(llm.tokenize(ALPHABET), 50.0)  # so that a token is a character
    free = llm.generate(["hello"], params(logit_bias=letters))[0]
    stop = free.text[3:5]
    first = free.text.index(stop)
    cut = llm.generate(["hello"], params(logit_bias=letters, stop=stop))[0]
    assert cut.text == free.text[:first] and cut.outputs[0].stop_reason == stop
    shown = llm.generate(["hello"], params(logit_bias=letters, stop=stop, include_stop_str_in_output=True))[0]
    assert shown.text == free.text[: first + 2]
    for min_tokens in (first + 1, first + 2, 12):
        asked = params(logit_bias=letters, stop=stop, min_tokens=min_tokens)
        later = llm.generate(["hello"], asked)[0]
        at = free.text.find(stop, min_tokens - 1)  # it may begin within min_tokens, but not end there
        assert later.text == (free.text if at < 0 else free.text[:at])
        assert "".join(piece.text for piece in llm.stream("hello", asked)) == later.text


def test_special_tokens_are_shown_when_asked(llm):
    bias = {257: 100.0}
    assert llm.generate(["hello"], params(max_tokens=2, logit_bias=bias))[0].text == ""
    shown = params(max_tokens=2, logit_bias=bias, skip_special_tokens=False)
    assert llm.generate(["hello"], shown)[0].text == "<s><s>"


def test_ids_that_only_the_model_has_are_no_text_and_no_error(llm):
    out = llm.generate(["hello"], params(max_tokens=3, logit_bias={310: 100.0}))[0]
    assert (out.outputs[0].token_ids, out.text) == ([310] * 3, "")
    pieces = list(llm.stream("hello", params(max_tokens=3, logit_bias={310: 100.0})))
    assert "".join(p.text for p in pieces) == ""


def test_chat_answers_one_conversation_or_many(llm):
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go"}]
    single = llm.chat(one, params())
    first, second = llm.chat([one, two], params())
    assert len(single) == 1 and first.outputs[0].token_ids == single[0].outputs[0].token_ids
    prompt = llm.detokenize(second.prompt_token_ids, skip_special_tokens=False)
    assert prompt == "<s>user\nhi<s>assistant\nyes<s>user\ngo"


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user", "content": "hi"}, [5], [[5]], [None], iter(())])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages, params())


def test_text_and_tokens_are_each_others_inverse(llm):
    assert llm.detokenize(llm.tokenize("hello, 世界")) == "hello, 世界"


def test_abort_by_id_and_abort_all(llm):
    stream = llm.stream("hello", params(max_tokens=40))
    first = next(stream)
    llm.abort(first.request_id)
    rest = list(stream)
    output = rest[-1].output
    assert output is not None and output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) < 40

    def stop_all(number, output):
        llm.abort()

    prompts = [[5], [6], [7]]
    outs = llm.generate(
        prompts, [params(max_tokens=3), params(max_tokens=40), params(max_tokens=40)], on_finished=stop_all
    )
    assert [o.outputs[0].finish_reason for o in outs] == ["length", "abort", "abort"]
    assert llm.stats().pages_locked == 0


def test_results_are_told_as_they_come(llm):
    seen = []
    outs = llm.generate(
        [[5], [6], [7]],
        [params(max_tokens=n) for n in (9, 3, 6)],
        on_finished=lambda number, output: seen.append((number, output)),
    )
    assert [number for number, _ in seen] == [1, 2, 0]
    assert all(outs[number] is output for number, output in seen)


def test_check_raises_what_generate_would_and_queues_nothing(llm):
    llm.check("hello", params())
    for prompt, wrong in (("", params()), ([400], params()), ([5], params(logit_bias={400: 1.0}))):
        with pytest.raises(ValueError, match=r"prompt|logit_bias"):
            llm.check(prompt, wrong)
        with pytest.raises(ValueError, match=r"prompt|logit_bias"):
            llm.generate([prompt], wrong)
    assert llm.stats().waiting == 0


def test_a_failing_device_ends_followers_too(llm, monkeypatch):
    def fail(batch):
        raise RuntimeError("broken")

    launch = llm._engine.runner.launch
    monkeypatch.setattr(llm._engine.runner, "launch", fail)
    with pytest.raises(RuntimeError, match="broken"):
        llm.generate([[5]], params(n=3))
    monkeypatch.setattr(llm._engine.runner, "launch", launch)
    assert not llm._generations
    assert len(llm.generate([[5]], params(n=3))[0].outputs) == 3


def test_numpy_token_ids_are_token_ids(llm):
    assert llm.generate([list(np.arange(3, 9))], params())[0].prompt_token_ids == list(range(3, 9))


@pytest.fixture(scope="module")
def words(tiny_model, tmp_path_factory):
    """A tiny model with a sentencepiece-like tokenizer, whose words carry the space before them."""
    made = tmp_path_factory.mktemp("words")
    for file in tiny_model("LlamaForCausalLM").iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3} | {f"▁w{i}": i for i in range(4, 320)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<end>"])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return made


def test_the_space_before_an_answers_first_word_is_kept_after_a_text_and_left_out_after_token_ids(words):
    with LLM(str(words), dtype="float32", device="cpu") as llm:
        prompt = "w260 w261"
        out = llm.generate([prompt], params(max_tokens=4))[0]
        whole = llm.detokenize(out.prompt_token_ids + out.outputs[0].token_ids)
        assert prompt + out.text == whole and out.text.startswith(" w")
        assert "".join(p.text for p in llm.stream(prompt, params(max_tokens=4))) == out.text
        after_ids = llm.generate([out.prompt_token_ids], params(max_tokens=4))[0]
        assert after_ids.text == out.text[1:]


def test_a_row_of_a_batch_file_goes_on_with_its_text_as_generate_does(words):
    with LLM(str(words), dtype="float32", device="cpu") as llm:
        ids = llm.tokenize("w260 w261")
        want = [out.text for out in llm.generate(["w260 w261", ids], params(max_tokens=4))]
        assert want[0].startswith(" w") and want[1] == want[0][1:]
        body = {"prompt": ["w260 w261", ids], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        line = json.dumps({"custom_id": "x", "body": body}).encode()
        rows = []
        assert answer_rows(llm, [("x", line)], SamplingParams(), rows.append, lambda *_: None, lambda: None) == 0
        first, second = rows[0]["response"]["body"]["choices"]
        assert [first["text"], second["text"]] == want
        assert "".join(first["logprobs"]["tokens"]) == first["text"]


def test_the_tokenizers_end_of_text_ends_an_answer_too(words):
    with LLM(str(words), dtype="float32", device="cpu") as llm:
        out = llm.generate(["w260"], params(ignore_eos=False, logit_bias={3: 100.0}))[0].outputs[0]
        assert (out.token_ids, out.finish_reason, out.stop_reason, out.text) == ([3], "stop", None, "")
