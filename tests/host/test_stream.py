"""Whatever the tokenizer and the tokens: what is streamed is the full decode, cut at the first stop string."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tokenizers import trained
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from minisgl.tokenizer.stream import StreamDecoder
from minisgl.tokenizer.tokenizer import Tokenizer

CORPUS = """The capital of France is Paris. def main(argv):\n    if argv:\n        return argv[0]  # the first\n
日本語の文章と中文字符。Ünïcödé naïve café 😀 👩‍👩‍👧 the end, the beginning and the rest of it.""".splitlines()

TEXTS = [
    "The capital of France is Paris.",
    "def main(argv):\n    if argv:\n\t\treturn argv[0]\n\n\n",
    "中文字符没有空格，日本語もそうです。",
    "family 👩‍👩‍👧‍👦, flag 🏴󠁧󠁢󠁥󠁮󠁧󠁿, face 😀😃",
    "  two spaces,  and a trailing one ",
    "ไทย Ελληνικά עברית \u0301 \u200d",
    "",
]
"""Words, code, CJK, emoji that are joined of several characters, spaces, other scripts."""


def byte_level() -> tokenizers.Tokenizer:
    backend = trained(CORPUS, ["<|end|>"])
    # Written as themselves, though some of their characters have another meaning in a byte-level vocabulary.
    backend.add_tokens(["<tool call>", "café", "Ġ世界"])
    return backend


def byte_fallback(strip: bool) -> tokenizers.Tokenizer:
    """As in the tokenizer.json of Llama 2 (with strip) and Gemma (without)."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(vocab_size=120, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]),
    )
    spec = json.loads(trained.to_str())
    words = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    words[3:3] = [f"<0x{byte:02X}>" for byte in range(256)]
    spec["model"] |= {"vocab": {w: i for i, w in enumerate(words)}, "byte_fallback": True, "fuse_unk": True}
    backend = tokenizers.Tokenizer.from_str(json.dumps(spec | {"pre_tokenizer": None}))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_tokens([AddedToken("<tool call>"), AddedToken("▁▁added▁")])
    return backend


def word_level(decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    words = ["<unk>", "▁the", "the", "##s", "▁", "▁▁", "end", ".", ",", "▁of", "x▁y", "\ufffd", "é", "e</w>"]
    backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<|end|>"])
    return backend


BACKENDS = {
    "byte-level": byte_level(),
    "byte fallback": byte_fallback(strip=False),
    "byte fallback, first space stripped": byte_fallback(strip=True),
    "metaspace": word_level(decoders.Metaspace()),
    "wordpiece": word_level(decoders.WordPiece()),
    "bpe with suffix": word_level(decoders.BPEDecoder()),
    "fuse": word_level(decoders.Fuse()),
    "none": word_level(None),
}
TOKENIZERS = {name: Tokenizer(backend) for name, backend in BACKENDS.items()}
FALLBACK = [name for name in BACKENDS if name.startswith("byte fallback")]
OF_TEXT = ["byte-level", *FALLBACK]

CHUNKS = st.lists(st.integers(1, 3), min_size=1, max_size=4)
"""How many tokens arrive together, over and over."""


def feed(decoder: StreamDecoder, ids: list[int], chunks: list[int]) -> list[str]:
    """Push all ids in the given rhythm and return the pieces, the last one from `finish`."""
    pieces, sizes = [], itertools.cycle(chunks)
    while ids:
        size = next(sizes)
        pieces.append(decoder.push(ids[:size]))
        ids = ids[size:]
    return [*pieces, decoder.finish()]


def answers(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, most of them no UTF-8, and encoded texts with random ids between them."""
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20)
    texts = st.sampled_from([tokenizer.encode(text) for text in TEXTS])
    return st.lists(ids | texts, max_size=4).map(lambda parts: list(itertools.chain(*parts)))


def longest_run(ids: list[int]) -> int:
    """The most byte tokens in a row, in a byte_fallback vocabulary, where special tokens do not count."""
    runs = "".join("b" if 3 <= i < 259 else "" if i < 3 else " " for i in ids).split()
    return max(map(len, runs), default=0)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data(), chunks=CHUNKS)
@settings(max_examples=60, deadline=None)
def test_pieces_joined_are_the_full_decode(name, skip, data, chunks):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(answers(tokenizer))
    decoder = StreamDecoder(tokenizer, skip_special_tokens=skip)
    text = "".join(feed(decoder, ids, chunks))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)
    if name not in FALLBACK or longest_run(ids) < 64:
        assert text == BACKENDS[name].decode(ids, skip_special_tokens=skip)
    assert decoder.num_tokens_kept == len(ids) and decoder.matched is None
    assert decoder.finish() == ""


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "bpe with suffix"])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_bytes_of_tokens_joined_are_what_they_add_to_a_text(name, data):
    tokenizer = TOKENIZERS[name]
    before = token_id(name, "e" if name in OF_TEXT else "the")
    ids = data.draw(answers(tokenizer) | st.sampled_from([tokenizer.encode(text) for text in TEXTS]))
    joined = b"".join(map(tokenizer.token_bytes, ids))
    whole, alone = (BACKENDS[name].decode(tokens, skip_special_tokens=False) for tokens in ([before, *ids], [before]))
    if name == "byte-level":
        assert whole == alone + joined.decode(errors="replace")
    elif is_utf8(joined) and longest_run(ids) < 64:  # a byte token that is not spoils its neighbours in the text
        assert whole == alone + joined.decode()


def is_utf8(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


def test_the_bytes_of_a_tokenizers_own_text_are_its_utf8():
    for name in OF_TEXT:
        for text in TEXTS:
            joined = b"".join(map(TOKENIZERS[name].token_bytes, TOKENIZERS[name].encode(text)))
            assert joined.decode() in (text, f" {text}"), name  # sentencepiece's first word has its space


def test_a_part_of_a_character_is_its_own_bytes_and_an_unknown_id_none():
    as_bytes = [token_id("byte-level", BYTE_CHARACTERS[byte]) for byte in "世".encode()]
    assert [TOKENIZERS["byte-level"].token_bytes(token) for token in as_bytes] == [b"\xe4", b"\xb8", b"\x96"]
    assert TOKENIZERS["byte fallback"].token_bytes(token_id("byte fallback", "<0xE4>")) == b"\xe4"
    assert [tokenizer.token_bytes(10**6) for tokenizer in TOKENIZERS.values()] == [b""] * len(TOKENIZERS)


def byte_characters() -> dict[int, str]:
    """The character that each byte is written as in a byte-level vocabulary."""
    points = [*range(0x800), *range(0x800, 0xD800, 0x800), *range(0xE000, 0x110000, 0x1000)]
    text = "".join(map(chr, points))
    [(written, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    never_in_utf8 = (0xC0, 0xC1, *range(0xF5, 0x100))
    return dict(zip(text.encode(), written, strict=True)) | {byte: chr(byte) for byte in never_in_utf8}


BYTE_CHARACTERS = byte_characters()


@given(
    parts=st.lists(
        st.binary(max_size=3) | st.characters(codec="utf-8").map(lambda c: c.encode()[: ord(c) % 5]), max_size=12
    )
)
@settings(max_examples=500, deadline=None)
def test_bytes_that_are_not_utf8_become_what_the_tokenizers_library_makes_of_them(parts):
    backend, tokenizer = BACKENDS["byte-level"], TOKENIZERS["byte-level"]
    ids = [token_id("byte-level", BYTE_CHARACTERS[byte]) for byte in b"".join(parts)]
    assert "".join(feed(StreamDecoder(tokenizer), ids, [1])) == backend.decode(ids)


def reference(backend: tokenizers.Tokenizer, ids: list[int], stops: list[str]) -> tuple[str, str | None, int]:
    """Text, stop string and tokens kept, by decoding every prefix and looking at every place."""
    for kept in range(len(ids) + 1):
        text = backend.decode(ids[:kept], skip_special_tokens=True)
        for end in range(len(text) + 1):
            if ended := [stop for stop in stops if text[:end].endswith(stop)]:
                matched = max(ended, key=len)
                return text[: end - len(matched)], matched, kept
    return backend.decode(ids, skip_special_tokens=True), None, len(ids)


@pytest.mark.parametrize("name", OF_TEXT)
@given(data=st.data(), chunks=CHUNKS)
@settings(max_examples=80, deadline=None)
def test_text_ends_before_the_stop_string_that_completes_first(name, data, chunks):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(answers(tokenizer).filter(lambda ids: longest_run(ids) < 64))[:60]
    text = tokenizer.decode(ids)
    places = st.tuples(st.integers(0, len(text)), st.integers(1, 8)).map(lambda place: text[place[0] : sum(place)])
    stops = data.draw(st.lists(places | st.text("the d\n中", min_size=1, max_size=3), max_size=4))
    stops = [stop for stop in stops if stop and "\ufffd" not in stop]
    decoder = StreamDecoder(tokenizer, stop=stops)
    pieces = feed(decoder, ids, chunks)
    assert ("".join(pieces), decoder.matched, decoder.num_tokens_kept) == reference(BACKENDS[name], ids, stops)


@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
@settings(max_examples=300, deadline=None)
def test_overlapping_and_repeating_stop_strings_are_found(text, stops):
    backend, tokenizer = BACKENDS["byte-level"], TOKENIZERS["byte-level"]
    ids = [token_id("byte-level", character) for character in text]
    decoder = StreamDecoder(tokenizer, stop=stops)
    pieces = feed(decoder, ids, [1])
    assert ("".join(pieces), decoder.matched, decoder.num_tokens_kept) == reference(backend, ids, stops)


@given(
    text=st.text("ab", max_size=20),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_a_stop_string_counts_if_it_completes_after_min_tokens_wherever_it_begins(text, stops, min_tokens, include):
    ids = [token_id("byte-level", character) for character in text]
    decoder = StreamDecoder(TOKENIZERS["byte-level"], stop=stops, min_tokens=min_tokens, include_stop=include)
    pieces = feed(decoder, ids, [1])
    ends = [end for end in range(min_tokens + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    if not ends:
        assert ("".join(pieces), decoder.matched) == (text, None)
        return
    matched = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    # Of a stop string that begins within min_tokens nothing was sent either.
    shown = text[: ends[0]] if include else text[: ends[0] - len(matched)]
    assert ("".join(pieces), decoder.matched, decoder.num_tokens_kept) == (shown, matched, ends[0])


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_only_a_possible_stop_string_is_held_back(data):
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode(data.draw(st.text("ab \n", max_size=20)))
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
    decoder, sent = StreamDecoder(tokenizer, stop=stops), ""
    for count, token in enumerate(ids, start=1):
        sent += decoder.push([token])
        if decoder.matched is None:
            text = tokenizer.decode(ids[:count])
            suffixes = [text[at:] for at in range(len(text) + 1)]
            held = next(s for s in suffixes if not s or any(stop.startswith(s) for stop in stops))
            assert sent + held == text


def token_id(name: str, token: str) -> int:
    found = BACKENDS[name].token_to_id(token)
    assert found is not None, token
    return found


def pieces_of(name: str, tokens: list[str], **options) -> list[str]:
    """What each of these tokens, pushed alone, lets go, and last what `finish` does."""
    decoder = StreamDecoder(TOKENIZERS[name], **options)
    return [decoder.push([token_id(name, token)]) for token in tokens] + [decoder.finish()]


def test_a_character_split_over_tokens_is_sent_once_and_whole():
    written = [BYTE_CHARACTERS[byte] for byte in "世😃".encode()]
    assert pieces_of("byte-level", written) == ["", "", "世", "", "", "", "😃", ""]
    as_bytes = [f"<0x{byte:02X}>" for byte in "世".encode()]
    assert pieces_of("byte fallback", [*as_bytes, "e"]) == ["", "", "", "世e", ""]


def test_an_incomplete_character_is_not_held_for_ever():
    lead = BYTE_CHARACTERS[0xE4]
    assert pieces_of("byte-level", [lead] * 4) == ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]
    assert pieces_of("byte fallback", ["<0xE4>"] * 4) == ["", "\ufffd" * 2, "\ufffd", "\ufffd", ""]
    assert pieces_of("byte fallback", ["<0xE4>"]) == ["", "\ufffd"]
    assert pieces_of("none", ["\ufffd"] * 4)[3] == "\ufffd \ufffd \ufffd \ufffd"


def test_a_long_run_of_byte_tokens_is_not_held_for_ever_and_keeps_what_was_sent():
    tokens = [f"<0x{byte:02X}>" for byte in ("語" * 30).encode()]
    pieces = pieces_of("byte fallback", [*tokens, "<0xFF>"])
    assert pieces[63] == "語" * 21
    assert "".join(pieces) == "語" * 21 + "\ufffd" * 28


def test_a_stop_string_of_byte_tokens_ends_the_answer_at_once():
    newline = token_id("byte fallback", "<0x0A>")
    decoder = StreamDecoder(TOKENIZERS["byte fallback"], stop=["\n"])
    assert decoder.push([newline]) == ""
    assert (decoder.matched, decoder.num_tokens_kept) == ("\n", 1)


def test_part_of_a_stop_string_is_never_sent_and_comes_at_the_end_if_it_stays_one():
    assert pieces_of("byte-level", list("ABCDEFG"), stop=["DEFGHIJ"]) == ["A", "B", "C", "", "", "", "", "DEFG"]
    assert pieces_of("byte-level", list("ABCDEX"), stop=["DEFGHIJ"]) == ["A", "B", "C", "", "", "DEX", ""]


def test_a_stop_string_inside_a_token_keeps_the_token_and_the_text_before_it():
    [token] = TOKENIZERS["byte-level"].encode("<tool call>")
    decoder = StreamDecoder(TOKENIZERS["byte-level"], stop=["ol"])
    assert decoder.push([token, token]) == "<to"
    assert (decoder.matched, decoder.num_tokens_kept) == ("ol", 1)
    assert decoder.push([token]) == decoder.finish() == ""
    assert decoder.num_tokens_kept == 1


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [(["bcd", "c"], "ab", "c"), (["c", "bc"], "a", "bc"), (["bc", "abcd"], "a", "bc"), (["cd", "cde"], "ab", "cd")],
)
def test_of_several_stop_strings_the_first_to_complete_wins_and_then_the_longest(stops, text, matched):
    decoder = StreamDecoder(TOKENIZERS["byte-level"], stop=stops)
    assert decoder.push(TOKENIZERS["byte-level"].encode("abcdef")) == text
    assert decoder.matched == matched


@pytest.mark.parametrize("stop", ["end", ["end", ""]])
def test_a_stop_that_is_no_list_of_texts_is_refused(stop):
    with pytest.raises(ValueError, match="list of non-empty strings"):
        StreamDecoder(TOKENIZERS["byte-level"], stop=stop)


def test_special_tokens_are_shown_only_on_request():
    tokens = ["a", "<|end|>", "b"]
    assert pieces_of("byte-level", tokens) == ["a", "", "b", ""]
    assert pieces_of("byte-level", tokens, skip_special_tokens=False) == ["a", "<|end|>", "b", ""]


def test_the_first_space_is_dropped_at_the_start_of_a_text_but_not_after_a_prompt():
    name = "byte fallback, first space stripped"
    prompt = TOKENIZERS[name].encode("The")
    assert "".join(pieces_of(name, ["▁the", "▁the"])) == "the the"
    assert "".join(pieces_of(name, ["▁the", "▁the"], prompt_tail=prompt)) == " the the"


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_after_a_prompt_the_text_is_what_the_tokens_add_to_the_prompts(name, data):
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode("The the end")
    ids = data.draw(answers(tokenizer).filter(lambda ids: longest_run(ids) < 64))
    decoder = StreamDecoder(tokenizer, prompt_tail=prompt)
    whole = BACKENDS[name].decode(prompt + ids, skip_special_tokens=True)
    assert tokenizer.decode(prompt) + "".join(feed(decoder, ids, [1])) == whole


def test_a_byte_token_that_ends_the_prompt_is_not_repeated_in_the_answer():
    newline = token_id("byte fallback", "<0x0A>")
    assert pieces_of("byte fallback", ["t"], prompt_tail=[newline]) == ["t", ""]


def test_an_id_that_the_tokenizer_does_not_know_has_no_text():
    for name, tokenizer in TOKENIZERS.items():
        known = token_id(name, "e" if name in OF_TEXT else "end")
        decoder = StreamDecoder(tokenizer)
        assert decoder.push([known, 10**6, known]) + decoder.finish() == tokenizer.decode([known, known])
