"""Text to token ids and back, with a model's chat template. No torch, no transformers in this process."""

import functools
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from minisgl.tokenizer.stream import Detokenizer
from minisgl.tokenizer.template import ChatTemplate


class Tokenizer:
    """A model's tokenizer: the tokenizers library's, with the model's special tokens and chat template.

    It owns `backend`, and switches off truncation and padding that its file may ask for: a prompt is never cut.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`config` is what tokenizer_config.json holds; `templates` are chat templates by name."""
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        special_tokens = _special_tokens(config)
        # One that is only a word of the vocabulary would be split in prompts and shown in answers.
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        plain = [t for t in special_tokens.values() if t not in added and backend.token_to_id(t) is not None]
        backend.add_special_tokens(plain)
        self._template = ChatTemplate(templates, special_tokens) if templates else None
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self._bos = self._ids_of(self.bos_token)
        self._eos = self._ids_of(self.eos_token)
        self._wants_bos = bool(config.get("add_bos_token"))
        self._wants_eos = bool(config.get("add_eos_token"))
        self._backend_adds_bos = backend.encode("").ids[:1] == self._bos != []

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer of a model folder. Raises ValueError where there is none or it cannot be read."""
        tokenizer = cls.find(folder)
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer.json; without a tokenizer, prompts are token ids")
        return tokenizer

    @classmethod
    def find(cls, folder: Path, chat_template: str | None = None) -> Self | None:
        """Like `load`, but None where the folder has no tokenizer.json: prompts are token ids then.

        A `chat_template` takes the place of those in the folder.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        config = _read_json(folder / "special_tokens_map.json") | {
            key: value for key, value in _read_json(folder / "tokenizer_config.json").items() if value is not None
        }
        return cls(backend, config, _templates(folder, config) if chat_template is None else {"default": chat_template})

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id, added tokens included; a model's own may be larger, for padding."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer, as far as the tokenizer knows; the model's configuration may name more."""
        return tuple(self._eos)

    @functools.cached_property
    def detokenizer(self) -> Detokenizer:
        """What the streams of this tokenizer share."""
        return Detokenizer(self._backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        With special tokens, BOS and EOS are added where tokenizer.json or tokenizer_config.json says so; a text that
        itself begins with BOS gets no second one. Raises ValueError for text that is not Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts, on all cores."""
        for text in texts:
            _check_text(text)
        # Also for one text: unlike the library's `encode`, it lets other threads run meanwhile.
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return [encoding.ids for encoding in encodings]
        return [self._with_ends(encoding.ids) for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD. Raises ValueError for an id out of range."""
        try:
            ids = [operator.index(i) for i in ids]
        except TypeError:
            raise ValueError(f"token ids must be a list of whole numbers, got {ids!r:.80}") from None
        if unknown := [i for i in ids if not 0 <= i < self.vocab_size]:
            raise ValueError(f"token ids must be from 0 to {self.vocab_size - 1}, got {unknown[0]}")
        return self.detokenizer.decode(ids, skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """What a token is within a text, in UTF-8, also a part of a character; none for an id that it does not know."""
        return self.detokenizer.token_bytes(token)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt for a conversation, as text; `options` as in `ChatTemplate.render`."""
        if self._template is None:
            raise ValueError(
                "the model has no chat template: give it plain prompts (--raw, /v1/completions), or put a "
                "chat_template.jinja in its folder"
            )
        return self._template.render(messages, **options)

    def chat(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """The prompt for a conversation, as token ids: the template writes the special tokens, none are added."""
        return self.encode(self.apply_chat_template(messages, **options), add_special_tokens=False)

    def _with_ends(self, ids: list[int]) -> list[int]:
        """Add what tokenizer_config.json asks for and tokenizer.json has not added, and never BOS twice."""
        if self._backend_adds_bos and ids[:2] == self._bos * 2:
            ids = ids[1:]
        if self._wants_bos and ids[:1] != self._bos:
            ids = self._bos + ids
        if self._wants_eos and ids[-1:] != self._eos:
            ids = ids + self._eos
        return ids

    def _ids_of(self, token: str | None) -> list[int]:
        """A special token's id, or none."""
        found = None if token is None else self._backend.token_to_id(token)
        return [] if found is None else [found]


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"a text must be a string, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a text must be Unicode: character {error.start} is half of a surrogate pair, {text[error.start]!r}"
        ) from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config.json, which writes each as a string or as an object."""
    contents = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name.endswith("_token")
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Files of their own win over tokenizer_config.json, and that over chat_template.json."""
    written = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
    try:
        if isinstance(written, str):
            written = {"default": written}
        elif not isinstance(written, Mapping):
            written = {entry["name"]: entry["template"] for entry in written}
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{folder}: chat_template must be a string or a list of objects with name and template"
        ) from error
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (path := folder / "chat_template.jinja").is_file():
        files["default"] = path
    return {**written, **{name: path.read_text(encoding="utf-8") for name, path in files.items()}}


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold an object, got {value!r:.80}")
    return value
