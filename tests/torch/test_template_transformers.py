"""Prompts and answers beside transformers, for a tokenizer of each family that is supported."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from minisgl.tokenizer.stream import StreamDecoder
from minisgl.tokenizer.tokenizer import Tokenizer

LLAMA2 = """\
{%- if messages[0]['role'] == 'system' -%}
  {%- set rest, system = messages[1:], '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' -%}
{%- else -%}
  {%- set rest, system = messages, '' -%}
{%- endif -%}
{%- for m in rest -%}
  {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{- raise_exception('roles must take turns, user first') -}}
  {%- endif -%}
  {%- if m['role'] == 'user' -%}
    {{- bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' -}}
  {%- else -%}
    {{- ' ' + m['content'] | trim + ' ' + eos_token -}}
  {%- endif -%}
{%- endfor -%}
"""

LLAMA3 = """\
{{ bos_token }}{% set ns = namespace(tools=tools is not none and tools | length > 0) %}
{% for m in messages %}
<|header|>{{ m.role }}<|/header|>

{% if loop.first and ns.tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ m['content'] | trim }}<|turn|>
{% endfor %}
{% if add_generation_prompt %}
<|header|>assistant<|/header|>

{% endif %}
"""

CHATML = """\
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{- m.content }}{% endgeneration %}{{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


@dataclass(frozen=True)
class Family:
    """What a model of it has in its folder."""

    kind: str
    template: str
    special: tuple[str, ...]
    bos: str | None
    eos: str
    adds_bos: bool
    config: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "Llama 2": Family("sentencepiece", LLAMA2, (), "<s>", "</s>", True, {"add_bos_token": True}),
    "Llama 3": Family("byte-level", LLAMA3, ("<|header|>", "<|/header|>", "<|turn|>"), "<|begin|>", "<|turn|>", True),
    "Mistral": Family("sentencepiece", LLAMA2, ("[INST]", "[/INST]"), "<s>", "</s>", True, {"add_eos_token": False}),
    "Qwen": Family("byte-level", CHATML, ("<|im_start|>", "<|im_end|>"), None, "<|im_end|>", False),
    "SmolLM2": Family("byte-level", CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_start|>", "<|im_end|>", False),
}

WORDS = ["The", " the", " capital", " of", " France", " is", " Paris", "user", "assistant", "system", " a", "世界"]

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "  The capital of France?\n"}],
    "with a system message": [
        {"role": "system", "content": "Be brief. <é> & 'x'"},
        {"role": "user", "content": "世界 😀\tis"},
    ],
    "several turns": [
        {"role": "user", "content": "The capital of France is"},
        {"role": "assistant", "content": " Paris, 世界 "},
        {"role": "user", "content": "of\n\n  Paris"},
    ],
}


def backend_of(family: Family) -> tokenizers.Tokenizer:
    """A small vocabulary of the family's kind: single bytes and a few words."""
    special = list(dict.fromkeys(t for t in (family.bos, family.eos, *family.special) if t))
    if family.kind == "byte-level":
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words = [*sorted(splitter.alphabet()), *(splitter.pre_tokenize_str(word)[0][0] for word in WORDS)]
        backend = tokenizers.Tokenizer(
            models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], ignore_merges=True)
        )
        backend.pre_tokenizer, backend.decoder = splitter, decoders.ByteLevel()
    else:
        letters = sorted({c for word in WORDS for c in word.replace(" ", "▁") if c.isascii() or c == "▁"})
        words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "▁t", "▁th", "▁the"]
        merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
        vocab = {w: i for i, w in enumerate(words)}
        backend = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
        )
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if family.adds_bos:
        assert family.bos is not None
        bos = backend.token_to_id(family.bos)
        backend.post_processor = processors.TemplateProcessing(
            single=[family.bos, "$A"], special_tokens=[(family.bos, bos)]
        )
    return backend


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    family = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    backend_of(family).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos,
        "chat_template": family.template,
        **family.config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def ours(folder) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def theirs(folder) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("text", ["The capital of France is", " the", "", "世界 😀\n\n\tis", "a </s><|im_end|> b"])
def test_a_raw_prompt_has_the_ids_that_transformers_gives_it(ours, theirs, text):
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize(
    "options", [{}, {"tools": [{"name": "f", "about": "é <b>"}]}, {"enable_thinking": False}], ids=str
)
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "closed"])
def test_a_conversation_is_rendered_as_transformers_does(ours, theirs, name, options, opened):
    messages, options = CONVERSATIONS[name], {**options, "add_generation_prompt": opened}
    expected = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.apply_chat_template(messages, **options) == expected
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.chat(messages, **options) == ids
    assert ours.bos_token is None or ids.count(ours.encode(ours.bos_token)[0]) == expected.count(ours.bos_token)


@pytest.mark.parametrize("content", ["Paris", "Paris ", " Paris is\n\n", "世界"])
def test_an_answer_is_continued_as_transformers_does(ours, theirs, content):
    messages = [*CONVERSATIONS["one question"], {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours.apply_chat_template(messages, continue_final_message=True) == expected


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_stream_to_the_text_that_transformers_decodes(ours, theirs, skip):
    draws = random.Random(0)
    for _ in range(50):
        ids = [draws.randrange(ours.vocab_size) for _ in range(draws.randrange(60))]
        decoder = StreamDecoder(ours, skip_special_tokens=skip)
        text = "".join([decoder.push([i]) for i in ids]) + decoder.finish()
        assert text == ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
