"""The tokenizer of a GGUF file as the tokenizer.json that it was made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from minisgl.source.fields import Fields, write_json
from minisgl.source.folder import TOKENIZER

# tokenizer_config.json's names of special tokens, and the metadata's
_SPECIAL_KEYS: Mapping[str, str] = MappingProxyType({"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"})
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, kw_only=True)
class _Splitter:
    """How the tokenizers that share a `tokenizer.ggml.pre` cut a text into words, before byte-level BPE."""

    pattern: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # each digit is a word, before the pattern
    nfc: bool = False
    whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # unless the file says


_SPLITTERS: Mapping[str, _Splitter] = MappingProxyType(
    {
        "gpt-2": _Splitter(),
        "smollm": _Splitter(single_digits=True),
        "llama-bpe": _Splitter(pattern=rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", whole_words=True, add_bos=True),
        "qwen2": _Splitter(pattern=rf"{_WORDS}|\p{{N}}|{_REST}", nfc=True),
    }
)


def special_token_ids(fields: Fields) -> dict[str, Any]:
    """The BOS, EOS and padding tokens as config.json spells them; end of turn and of message count as EOS too."""
    names = ("bos", "padding", "eos", "eot", "eom")
    bos, pad, *eos = (fields.optional(f"tokenizer.ggml.{name}_token_id", int) for name in names)
    ends = list(dict.fromkeys(token for token in eos if token is not None))
    return {"bos_token_id": bos, "eos_token_id": ends[0] if len(ends) == 1 else ends or None, "pad_token_id": pad}


def write_tokenizer(fields: Fields, folder: Path, vocab_size: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. ValueError for a kind of tokenizer that is not known exactly."""
    tokens = fields.list_of("tokenizer.ggml.tokens", str)
    ids = {token: number for number, token in enumerate(tokens)}
    kinds = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in fields.values:
        kinds = fields.list_of("tokenizer.ggml.token_type", int)
    if len(ids) < len(tokens) or len(kinds) != len(tokens) or len(tokens) > vocab_size:
        raise ValueError(
            f"{fields.where}: the vocabulary is inconsistent: {len(tokens)} tokens, {len(ids)} different ones, "
            f"{len(kinds)} token types, {vocab_size} embeddings"
        )
    special = {name: _token(fields, f"tokenizer.ggml.{key}_token_id", tokens) for name, key in _SPECIAL_KEYS.items()}
    match fields.get("tokenizer.ggml.model", str):
        case "gpt2":
            tokenizer, add_bos = _byte_level(fields, ids)
        case "llama":
            pieces = {token: number for token, number in ids.items() if kinds[number] == _NORMAL}
            tokenizer, add_bos = _sentencepiece(fields, ids, pieces, special["unk"]), True
        case _:
            raise fields.wrong("tokenizer.ggml.model", "gpt2 or llama")
    # Found in a text as they stand, before it is cut into words.
    added = {token: AddedToken(token, normalized=False) for token in tokens}
    tokenizer.add_special_tokens([added[tokens[n]] for n, kind in enumerate(kinds) if kind in (_CONTROL, _UNKNOWN)])
    tokenizer.add_tokens([added[tokens[n]] for n, kind in enumerate(kinds) if kind == _USER_DEFINED])
    if (said := fields.optional("tokenizer.ggml.add_bos_token", bool)) is not None:
        add_bos = said
    if fields.values.get("tokenizer.ggml.add_eos_token"):
        raise fields.wrong("tokenizer.ggml.add_eos_token", "false: a text to go on with does not end")
    if add_bos:
        if (bos := special["bos"]) is None:
            raise ValueError(f"{fields.where} asks for BOS to be added, but names no such token")
        tokenizer.post_processor = processors.TemplateProcessing([bos, "$A"], special_tokens=[(bos, ids[bos])])
    tokenizer.save(str(folder / TOKENIZER))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in special.items() if token is not None},
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        "chat_template": fields.optional("tokenizer.chat_template", str),
    }
    write_json(folder / "tokenizer_config.json", config)


def _byte_level(fields: Fields, ids: Mapping[str, int]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it puts BOS in front where the file does not say."""
    name = fields.optional("tokenizer.ggml.pre", str) or "none"
    if name not in _SPLITTERS:
        raise ValueError(
            f"{fields.where}: how its tokenizer splits words (tokenizer.ggml.pre: {name}) is not known; "
            f"known: {', '.join(_SPLITTERS)}; use the model's original folder or repo"
        )
    splitter = _SPLITTERS[name]
    cut = (merge.partition(" ") for merge in fields.list_of("tokenizer.ggml.merges", str))
    tokenizer = _bpe(fields, ids, [(left, right) for left, _, right in cut], ignore_merges=splitter.whole_words)
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitter.single_digits else []
    if splitter.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitter.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitter.add_bos


def _sentencepiece(fields: Fields, ids: Mapping[str, int], pieces: Mapping[str, int], unknown: str | None) -> Tokenizer:
    """SentencePiece's BPE as the merges of pieces that their scores amount to."""
    scores = fields.list_of("tokenizer.ggml.scores", float)
    if len(scores) != len(ids):
        raise ValueError(f"{fields.where} has {len(scores)} token scores for {len(ids)} tokens")
    merges = _merges(pieces, scores)
    tokenizer = _bpe(fields, ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    spaces: list[Any] = [normalizers.Replace(" ", "▁")]
    if fields.optional("tokenizer.ggml.add_space_prefix", bool) is not False:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
        spaces.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best-scored pieces first."""
    ranked = []
    for piece, number in ids.items():
        for left, right in ((piece[:cut], piece[cut:]) for cut in range(1, len(piece))):
            if left in ids and right in ids:
                ranked.append((-scores[number], number, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _bpe(fields: Fields, ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(dict(ids), merges, **options))
    except Exception as error:  # the library raises nothing more precise
        reason = str(error).splitlines()[0]
        raise ValueError(f"{fields.where}: the vocabulary and merges do not make a tokenizer: {reason}") from error


def _token(fields: Fields, key: str, tokens: Sequence[str]) -> str | None:
    """The token that a metadata key names by its id."""
    number = fields.optional(key, int)
    if number is not None and number >= len(tokens):
        raise fields.wrong(key, f"below the vocabulary's {len(tokens)} tokens")
    return None if number is None else tokens[number]
