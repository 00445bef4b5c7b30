"""Text to ids and back: one BOS, nothing cut, and a chat prompt that is exactly what its template wrote."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.tokenizer.tokenizer import Tokenizer

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


def byte_level(added: tuple[str, ...] = ("<bos>", "<eos>")) -> tokenizers.Tokenizer:
    """Every byte is a token: ids 0 to 255 in the order of the alphabet, then the added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(added))
    return backend


def adding_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """As the tokenizer.json of Llama 3 does it."""
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    return backend


def llama2() -> tokenizers.Tokenizer:
    """A sentencepiece model with byte fallback, as the tokenizer.json of Llama 2 has it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"HTehiorl", "▁H", "▁Hi", "▁T"]
    merges = [("▁", "H"), ("▁H", "i"), ("▁", "T")]
    vocab = {w: i for i, w in enumerate(words)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in words[:3]])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer | None = None, config: object = None, **files: str) -> Path:
    """A model folder with a tokenizer, as far as given; `chat_template_jinja="…"` writes chat_template.jinja."""
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        stem, _, kind = name.rpartition("_")
        (folder / f"{stem}.{kind}").write_text(text)
    return folder


# Encoding

BOS_AND_EOS = {"bos_token": "<bos>", "eos_token": "<eos>"}


@pytest.mark.parametrize("backend", [byte_level, lambda: adding_bos(byte_level())], ids=["plain", "adds bos"])
@pytest.mark.parametrize("flag", [None, False, True])
@pytest.mark.parametrize("text", ["Hi", "", "<bos>Hi"])
def test_a_raw_prompt_gets_one_bos_where_the_model_wants_one(backend, flag, text):
    tokenizer = Tokenizer(backend(), {**BOS_AND_EOS, "add_bos_token": flag})
    wanted = flag or backend().post_processor is not None or text.startswith("<bos>")
    plain = tokenizer.encode(text.removeprefix("<bos>"), add_special_tokens=False)
    assert tokenizer.encode(text) == [256] * bool(wanted) + plain


def test_a_bos_that_the_user_repeats_is_left_alone_where_none_is_added():
    assert Tokenizer(byte_level(), BOS_AND_EOS).encode("<bos><bos>") == [256, 256]


def test_eos_is_added_once_where_the_model_wants_it():
    tokenizer = Tokenizer(byte_level(), {**BOS_AND_EOS, "add_bos_token": True, "add_eos_token": True})
    plain = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi") == tokenizer.encode("Hi<eos>") == [256, *plain, 257]


def test_bos_is_not_added_where_the_model_has_none():
    plain = byte_level().encode("Hi").ids
    assert Tokenizer(byte_level(), {"add_bos_token": True}).encode("Hi") == plain
    assert Tokenizer(byte_level(), {"add_bos_token": True, "bos_token": None}).encode("Hi") == plain
    assert Tokenizer(byte_level(), {"add_bos_token": True, "bos_token": "<absent>"}).encode("Hi") == plain


def test_sentencepiece_text_and_bytes_come_back_as_they_were():
    tokenizer = Tokenizer(llama2(), {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    assert tokenizer.encode("Hi") == [1, llama2().token_to_id("▁Hi")]
    for text in ["Hi The", "  Hi", "世界\n", "H\ti"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_several_texts_are_encoded_as_each_alone():
    tokenizer = Tokenizer(adding_bos(byte_level()), BOS_AND_EOS)
    texts = ["Hi", "", "<bos>x", "世界"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_a_prompt_is_never_cut_or_padded():
    backend = byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode("one two three")) == 13
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "one two three four five"])] == [1, 23]


def test_a_prompt_of_a_million_characters_is_encoded_whole():
    tokenizer = Tokenizer(byte_level())
    text = "word " * 200_000
    assert len(tokenizer.encode(text)) == 10**6


def test_other_threads_run_while_a_long_prompt_is_encoded():
    tokenizer = Tokenizer(byte_level())
    text = "word " * 200_000
    switches = 0
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        switches += 1
    thread.join()
    assert switches > 3


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a\ud800b", r"character 1 is half of a surrogate pair, '\\ud800'"),
        (None, "a text must be a string, got None"),
        (b"Hi", "a text must be a string, got b'Hi'"),
    ],
)
def test_what_is_not_unicode_text_is_refused(text, error):
    with pytest.raises(ValueError, match=error):
        Tokenizer(byte_level()).encode(text)


def test_a_process_that_has_encoded_may_fork():
    program = """
import os, sys, tokenizers
from minisgl.tokenizer.tokenizer import Tokenizer
tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(sys.stdin.read()))
tokenizer.encode_batch(["Hi"] * 100)
if child := os.fork():
    sys.exit(os.waitpid(child, 0)[1])
os._exit(tokenizer.encode_batch(["Hi"] * 100) != [tokenizer.encode("Hi")] * 100)
"""
    ended = subprocess.run(
        # Python 3.12 warns of any fork in a process with threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        cwd=Path(__file__).parents[2],
        input=byte_level().to_str(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# Decoding


def test_special_tokens_are_decoded_only_on_request():
    tokenizer = Tokenizer(byte_level(), BOS_AND_EOS)
    ids = tokenizer.encode("<bos>Hi<eos>")
    assert tokenizer.decode(ids) == "Hi"
    assert tokenizer.decode(np.array(ids), skip_special_tokens=False) == "<bos>Hi<eos>"


@pytest.mark.parametrize("bad", [-1, 258, 2**40])
def test_an_id_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=f"token ids must be from 0 to 257, got {bad}"):
        Tokenizer(byte_level()).decode([0, bad])


@pytest.mark.parametrize("bad", [[1.0], ["1"], [None], [[1]], "Hi", 5, None, np.array(5)])
def test_what_is_no_list_of_ids_is_refused(bad):
    with pytest.raises(ValueError, match="token ids must be a list of whole numbers, got"):
        Tokenizer(byte_level()).decode(bad)


def test_the_vocabulary_ends_at_the_highest_id_even_where_ids_are_missing():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Tokenizer(backend).vocab_size == 8
    assert Tokenizer(backend).decode([0, 3, 7]) == "a b"


# Special tokens


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>", "lstrip": False, "__type": "AddedToken"}])
def test_special_tokens_are_named_by_strings_or_objects(eos):
    tokenizer = Tokenizer(byte_level(), {"eos_token": eos, "bos_token": None, "add_bos_token": False})
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_ids) == (None, "<eos>", (257,))


def test_a_special_token_that_is_a_plain_word_of_the_vocabulary_is_special_all_the_same():
    words = {"<unk>": 0, "Hi": 1, "<eos>": 2}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert backend.encode("Hi<eos>").ids == [1, 0, 0, 0]
    tokenizer = Tokenizer(backend, {"eos_token": "<eos>", "pad_token": "<not in the vocabulary>"})
    assert tokenizer.encode("Hi<eos>") == [1, 2]
    assert tokenizer.decode([1, 2]) == "Hi"
    assert tokenizer.vocab_size == 3


# Chat


@pytest.mark.parametrize("backend", [lambda: adding_bos(byte_level()), byte_level], ids=["adds bos", "plain"])
def test_a_chat_prompt_has_the_bos_of_its_template_and_no_second_one(backend):
    tokenizer = Tokenizer(backend(), {**BOS_AND_EOS, "add_bos_token": True}, {"default": CHAT})
    assert tokenizer.apply_chat_template(HI) == "<bos>[user]Hi"
    assert tokenizer.chat(HI) == [256, *byte_level().encode("[user]Hi").ids]


def test_a_chat_prompt_has_no_bos_where_its_template_writes_none():
    tokenizer = Tokenizer(adding_bos(byte_level()), BOS_AND_EOS, {"default": "{{ messages[0].content }}"})
    assert tokenizer.chat(HI) == byte_level().encode("Hi").ids


def test_options_reach_the_template():
    tokenizer = Tokenizer(byte_level(), {}, {"default": "{{ messages[-1].content }}{{ x }}{{ add_generation_prompt }}"})
    assert tokenizer.apply_chat_template(HI, x=1, add_generation_prompt=False) == "Hi1False"
    assert tokenizer.chat(HI, continue_final_message=True) == byte_level().encode("Hi").ids


def test_a_model_without_a_chat_template_says_what_to_do():
    with pytest.raises(ValueError, match=r"no chat template: give it plain prompts \(--raw, /v1/completions\)"):
        Tokenizer(byte_level()).chat(HI)


# Model folders


def test_a_folder_has_its_tokenizer_configuration_and_template(tmp_path):
    config = {**BOS_AND_EOS, "add_bos_token": True, "chat_template": CHAT}
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), config))
    assert tokenizer.encode("Hi")[0] == 256
    assert tokenizer.apply_chat_template(HI) == "<bos>[user]Hi"


def test_a_tokenizer_needs_no_configuration(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"
    assert tokenizer.eos_token_ids == ()


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    special = json.dumps({"bos_token": "<bos>", "eos_token": {"content": "<bos>"}})
    config = {"eos_token": "<eos>", "bos_token": None}
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), config, special_tokens_map_json=special))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", "<eos>")


@pytest.mark.parametrize(
    "written",
    [
        "one",
        {"default": "one", "rag": "two"},
        [{"name": "rag", "template": "two"}, {"name": "default", "template": "one"}],
    ],
)
def test_the_configuration_may_hold_one_template_or_several(tmp_path, written):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level(), {"chat_template": written}))
    assert tokenizer.apply_chat_template(HI) == "one"


def test_template_files_win_over_the_configuration(tmp_path):
    old = json.dumps({"chat_template": "old"})
    write(tmp_path, byte_level(), chat_template_json=old)
    assert Tokenizer.load(tmp_path).apply_chat_template(HI) == "old"
    write(tmp_path, config={"chat_template": [{"name": "default", "template": "config"}]})
    assert Tokenizer.load(tmp_path).apply_chat_template(HI) == "config"
    write(tmp_path, chat_template_jinja="file")
    assert Tokenizer.load(tmp_path).apply_chat_template(HI) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.apply_chat_template(HI) == "file"
    assert tokenizer.apply_chat_template(HI, tools=[{}]) == "tools"


def test_a_folder_without_a_tokenizer_leaves_token_ids_as_prompts(tmp_path):
    write(tmp_path, config={"eos_token": "<eos>"})
    assert Tokenizer.find(tmp_path) is None
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; without a tokenizer, prompts are token ids"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({"tokenizer_json": "{"}, r"tokenizer\.json is not a tokenizer: "),
        ({"tokenizer_config_json": "{"}, r"tokenizer_config\.json is not JSON: "),
        ({"tokenizer_config_json": "[]"}, r"tokenizer_config\.json must hold an object, got \[\]"),
        ({"tokenizer_config_json": '{"chat_template": [1]}'}, "chat_template must be a string or a list of objects"),
        ({"chat_template_json": "x"}, r"chat_template\.json is not JSON: "),
    ],
)
def test_a_broken_file_is_named(tmp_path, files, error):
    write(tmp_path, byte_level(), **files)
    with pytest.raises(ValueError, match=error):
        Tokenizer.find(tmp_path)
