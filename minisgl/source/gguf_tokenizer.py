"""The tokenizer of a GGUF file as the tokenizer.json that it was made from."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.source.fields import Fields
from minisgl.source.folder import TOKENIZER

# tokenizer_config.json's names of special tokens, and the metadata's
_SPECIAL_KEYS: Mapping[str, str] = MappingProxyType({"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"})
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (  # words that end where a lower-case letter meets an upper-case one
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
)


@dataclass(frozen=True, kw_only=True)
class _Splitter:
    """How the tokenizers that share a `tokenizer.ggml.pre` cut a text into words, before byte-level BPE."""

    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # each digit is a word, before the pattern
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # unless the file says

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)


_LLAMA3 = _Splitter(pattern=rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, add_bos=True)
_QWEN2 = _Splitter(pattern=rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True)
_SPLITTERS: Mapping[str, _Splitter] = MappingProxyType(
    {
        "gpt-2": _Splitter(),
        "smollm": _Splitter(single_digits=True),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _Splitter(
            pattern=rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            whole_words=True,
            add_bos=True,
        ),
    }
)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens by id, and what kind each is."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    ids: Mapping[str, int]

    def of_kind(self, *kinds: int) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds]


def special_token_ids(fields: Fields) -> dict[str, Any]:
    """The BOS, EOS and padding tokens as config.json spells them; end of turn and of message count as EOS too."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [fields.optional_integer(f"tokenizer.ggml.{name}") for name in names]
    eos = list(dict.fromkeys(token for token in found if token is not None))
    return {
        "bos_token_id": fields.optional_integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": fields.optional_integer("tokenizer.ggml.padding_token_id"),
    }


def write_tokenizer(fields: Fields, folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. ValueError for a kind of tokenizer that is not known exactly."""
    vocabulary = _vocabulary(fields, vocab_size)
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(fields, vocabulary)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(fields, vocabulary)
    else:
        raise fields.wrong("tokenizer.ggml.model", "gpt2 or llama")
    tokenizer.add_special_tokens([_added(token) for token in vocabulary.of_kind(_CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([_added(token) for token in vocabulary.of_kind(_USER_DEFINED)])
    adds = {
        "bos": _flag(fields, "tokenizer.ggml.add_bos_token", default=add_bos),
        "eos": _flag(fields, "tokenizer.ggml.add_eos_token", default=False),
    }
    special = {
        name: _token(fields, f"tokenizer.ggml.{key}_token_id", vocabulary) for name, key in _SPECIAL_KEYS.items()
    }
    for name, wanted in adds.items():
        if wanted and special[name] is None:
            raise ValueError(f"{fields.where} asks for {name.upper()} to be added, but names no such token")
    _add_automatically(tokenizer, special["bos"] if adds["bos"] else None, special["eos"] if adds["eos"] else None)
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in special.items() if token is not None},
        **{f"add_{name}_token": value for name, value in adds.items()},
        "clean_up_tokenization_spaces": False,
    }
    if (template := fields.optional_text("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _vocabulary(fields: Fields, vocab_size: int) -> _Vocabulary:
    tokens = fields.list_of("tokenizer.ggml.tokens", str)
    types_key = "tokenizer.ggml.token_type"
    kinds = fields.list_of(types_key, int) if types_key in fields.values else [_NORMAL] * len(tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens) or len(kinds) != len(tokens) or len(tokens) > vocab_size:
        raise ValueError(
            f"{fields.where}: the vocabulary is inconsistent: {len(tokens)} tokens, {len(ids)} different ones, "
            f"{len(kinds)} token types, {vocab_size} embeddings"
        )
    return _Vocabulary(tokens, kinds, ids)


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it puts BOS in front where the file does not say."""
    name = fields.optional_text("tokenizer.ggml.pre") or "none"
    if name not in _SPLITTERS:
        raise ValueError(
            f"{fields.where}: how its tokenizer splits words (tokenizer.ggml.pre: {name}) is not known; "
            f"known: {', '.join(_SPLITTERS)}; use the model's original folder or repo"
        )
    splitter = _SPLITTERS[name]
    cut = (merge.partition(" ") for merge in fields.list_of("tokenizer.ggml.merges", str))
    merges = [(left, right) for left, _, right in cut]
    tokenizer = _with_model(
        fields, lambda: models.BPE(dict(vocabulary.ids), merges, ignore_merges=splitter.whole_words)
    )
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.add_bos


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE as the merges that its scores amount to, and whether it puts BOS in front by default."""
    unknown = _token(fields, "tokenizer.ggml.unknown_token_id", vocabulary)
    merges = _merges(vocabulary, _scores(fields, vocabulary))
    tokenizer = _with_model(
        fields,
        lambda: models.BPE(dict(vocabulary.ids), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if _flag(fields, "tokenizer.ggml.add_space_prefix", default=True):
        steps.append(decoders.Strip(content=" ", left=1, right=0))
        spaces.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _scores(fields: Fields, vocabulary: _Vocabulary) -> list[float]:
    scores = fields.list_of("tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ValueError(f"{fields.where} has {len(scores)} token scores for {len(vocabulary.tokens)} tokens")
    return scores


def _merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best-scored pieces first."""
    ids = {token: vocabulary.ids[token] for token in vocabulary.of_kind(_NORMAL)}
    ranked = []
    for piece, number in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[number], number, ids[left], ids[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _with_model(fields: Fields, make: Callable[[], models.Model]) -> Tokenizer:
    try:
        return Tokenizer(make())
    except Exception as error:  # the library raises nothing more precise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{fields.where}: the vocabulary and merges do not make a tokenizer: {reason}") from error


def _added(token: str) -> AddedToken:
    """A token that is found in a text as it stands, before the text is cut into words."""
    return AddedToken(token, normalized=False)


def _add_automatically(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """Put BOS before, and EOS behind, every text that is tokenized with special tokens."""
    before, behind = [bos] if bos is not None else [], [eos] if eos is not None else []
    if before or behind:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A:0", *behind],
            pair=[piece for text in ("$A:0", "$B:1") for piece in (*before, text, *behind)],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*before, *behind}],
        )


def _token(fields: Fields, key: str, vocabulary: _Vocabulary) -> str | None:
    """The token that a metadata key names by its id."""
    number = fields.optional_integer(key)
    if number is not None and number >= len(vocabulary.tokens):
        raise fields.wrong(key, f"below the vocabulary's {len(vocabulary.tokens)} tokens")
    return None if number is None else vocabulary.tokens[number]


def _flag(fields: Fields, key: str, default: bool) -> bool:
    return fields.boolean(key) if key in fields.values else default
