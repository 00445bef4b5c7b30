"""Tokens to text while they come: nothing is sent twice, and nothing that a later token would change."""

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

if TYPE_CHECKING:
    from minisgl.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # stands in decoded text for bytes that are not UTF-8
_LONGEST_RUN = 64  # byte tokens held back together: two of the longest emoji, a long word in most scripts
_LONGEST_CHARACTER = 4  # bytes of a UTF-8 character, and so tokens that it can be spread over


class StreamDecoder:
    """One answer's tokens, decoded as they come, up to the first stop string.

    All pieces joined, with what `finish` returns, are `Tokenizer.decode` of all tokens, cut before the stop string.
    Held back are only the bytes of an incomplete character, a run of byte tokens that its next one could spoil
    (64 at most, see `_FallbackText`), and a tail that could become a stop string.

    The stop string that *completes* first wins, and of several that complete at the same character the longest:
    so the result does not depend on how the text falls into tokens, and no look-ahead is needed. The token in which
    it completes is the last one kept; what is pushed after it is ignored.

    `prompt_tail`, the prompt's last tokens, makes the text go on from the prompt's: sentencepiece drops the space
    before the first word of a text, but an answer's first word is not that. The EOS or stop token that ended the
    answer is not to be pushed, since its text is not shown. A token id unknown to the tokenizer has no text. What
    completes within the first `min_tokens` tokens is no stop string. `include_stop` leaves the stop string in the text.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        prompt_tail: Sequence[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop must be a list of non-empty strings, got {stop!r}")
        self.matched: str | None = None
        """The stop string that ended the answer."""
        self.num_tokens_kept = 0
        """How many of the tokens pushed belong to the answer."""
        self._stop, self._min_tokens, self._include_stop = tuple(stop), min_tokens, include_stop
        self._stop_begins = re.compile("|".join(re.escape(text[0]) for text in stop)).search
        self._held = ""  # what could become a stop string: never sent yet, and no stop string in it
        self._silent = tokenizer.detokenizer.special if skip_special_tokens else frozenset()
        self._text = tokenizer.detokenizer.start()
        for token in prompt_tail:
            if token not in self._silent:
                self._text.feed(token)
        self._text.settle()

    def push(self, tokens: Iterable[int]) -> str:
        """Take in the next tokens and return the text that is certain by now, often none."""
        sent = ""
        for token in tokens:
            if self.matched is not None:
                break
            self.num_tokens_kept += 1
            if token not in self._silent:
                text = self._text.feed(token)
                sent += self._until_stop(text) if self._stop else text
        return sent

    def finish(self) -> str:
        """Return all that was held back; the answer has ended, for whatever reason."""
        if self.matched is not None:
            return ""
        sent = self._until_stop(self._text.end())
        sent, self._held = sent + self._held, ""
        return sent

    def _until_stop(self, text: str) -> str:
        """Add certain text and return what of it can be sent, with regard to stop strings.

        A stop string in the tentative text counts too: the answer ends with it, so nothing can spoil it any more.
        One counts only if it ends in the new text: what completed within `min_tokens` may still be held.
        """
        known = len(self._held)
        text = self._held + text
        seen = text + self._text.tentative
        if not self._stop_begins(seen):  # nothing is held either: what is held begins a stop string
            return text
        places = ((seen.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stop)
        ends = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        if ends and self.num_tokens_kept > self._min_tokens:
            end, start, self.matched = min(ends)
            self._held = ""
            return seen[: end if self._include_stop else start]
        start = min((_possible_start(text, stop) for stop in self._stop), default=len(text))
        self._held = text[start:]
        return text[:start]


def _possible_start(text: str, stop: str) -> int:
    """Where the longest suffix of `text` begins that more text could make `stop`; len(text) if there is none."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)


class TokenText(Protocol):
    """The text of one sequence of tokens, as far as it is known."""

    @property
    def tentative(self) -> str:
        """Characters after the certain text that stand unless the next token spoils them."""
        ...

    def feed(self, token: int) -> str:
        """Add a token and return the text that became certain."""
        ...

    def settle(self) -> str:
        """Return the tentative text and take it for certain."""
        ...

    def end(self) -> str:
        """Return all text that is left when no further token comes."""
        ...


class Detokenizer:
    """How a tokenizer's tokens become text; shared by all its streams, and a cache of each token's piece.

    Byte-level BPE, and sentencepiece with byte fallback, are decoded piece by piece with the result that the
    tokenizers library has for the whole. Any other of its decoders is run over a window of the last tokens.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
        self._piece: Callable[[int], str | bytes | None] | None = None
        if decoder["type"] == "ByteLevel":
            self._piece = piece = _byte_pieces(backend)
            self._start = functools.partial(_ByteLevelText, piece)
        elif steps := _fallback_steps(decoder):
            self._piece = piece = _fallback_pieces(backend, steps)
            self._start = functools.partial(_FallbackText, piece, steps[-1])
        else:
            self._start = functools.partial(_WindowText, backend)

    def start(self) -> TokenText:
        """The text of a new sequence, without tokens yet."""
        return self._start()

    def decode(self, tokens: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence: by definition what a stream of it amounts to."""
        text = self.start()
        silent = self.special if skip_special_tokens else frozenset()
        return "".join([text.feed(token) for token in tokens if token not in silent]) + text.end()

    def token_bytes(self, token: int) -> bytes:
        """What a token is within a text, also a part of a character; the first word's space is in it."""
        if self._piece is None:  # what the token adds to itself
            once, twice = (self.decode([token] * count, False) for count in (1, 2))
            return twice[len(once) :].encode()
        piece = self._piece(token) or b""
        return piece if isinstance(piece, bytes) else piece.encode()


def _byte_pieces(backend: tokenizers.Tokenizer) -> Callable[[int], bytes]:
    """The bytes of a token in a byte-level vocabulary, where each byte is written as one printable character.

    See https://github.com/openai/gpt-2: bytes that are printable in Latin-1 stand for themselves, the others for
    the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    byte_of = {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}

    @functools.cache
    def piece(token: int) -> bytes:
        text = backend.id_to_token(token) or ""
        try:
            return bytes(byte_of[c] for c in text)
        except KeyError:  # an added token that is written as itself
            return text.encode()

    return piece


class _ByteLevelText:
    """Tokens are bytes of UTF-8."""

    tentative = ""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._incomplete = b""  # the start of a character, at most three bytes

    def feed(self, token: int) -> str:
        data = self._incomplete + self._piece(token)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return text

    def settle(self) -> str:
        return ""

    def end(self) -> str:
        text, self._incomplete = self._incomplete.decode(errors="replace"), b""
        return text


def _fallback_steps(decoder: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps of a decoder as sentencepiece models have it, Replace… ByteFallback Fuse Strip, or None."""
    steps = list(decoder.get("decoders", ()))
    if steps and steps[-1]["type"] == "Fuse":
        steps.append({"type": "Strip", "content": " ", "start": 0, "stop": 0})
    replaces = [s for s in steps if s["type"] == "Replace" and "String" in s["pattern"]]
    rest = steps[len(replaces) :]
    fits = [s["type"] for s in rest] == ["ByteFallback", "Fuse", "Strip"] and steps[: len(replaces)] == replaces
    return steps if fits and not rest[-1]["stop"] else None


def _fallback_pieces(backend: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> Callable[[int], str | bytes | None]:
    """The text of a token, or the byte that it stands for (`<0x0A>`), or None for an unknown id."""
    replaces = [(s["pattern"]["String"], s["content"]) for s in steps if s["type"] == "Replace"]

    @functools.cache
    def piece(token: int) -> str | bytes | None:
        text = backend.id_to_token(token)
        if text is None:
            return None
        for old, new in replaces:
            text = text.replace(old, new)
        return bytes.fromhex(text[3:5]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else text

    return piece


class _FallbackText:
    """Tokens are text, or single bytes for what the vocabulary lacks.

    The tokenizers library decodes a run of byte tokens as one: if it is not UTF-8, each of its bytes becomes U+FFFD,
    also those of good characters before the bad byte. So a run's text is certain only when the run ends. But it is
    not held for ever: after 64 bytes the characters so far are let go, and a bad byte spoils only those after them.
    Nowhere else does the text differ from the library's.
    """

    def __init__(self, piece: Callable[[int], str | bytes | None], strip: dict[str, Any]) -> None:
        self._piece = piece
        self._lead: str = strip["content"]  # taken away at the start of the text, …
        self._max_lead: int = strip["start"]  # … at most as often as this
        self._run = b""
        self._complete = ""  # characters of the run; its bytes after them are the start of one
        self._spoilt = False  # the run is not UTF-8 and none of it is held: each byte is certain to be U+FFFD

    @property
    def tentative(self) -> str:
        return self._complete[self._lead_of(self._complete) :]

    def feed(self, token: int) -> str:
        piece = self._piece(token)
        if piece is None:
            return ""
        text = self._feed_byte(piece) if isinstance(piece, bytes) else self._end_run() + piece
        return self._without_lead(text)

    def settle(self) -> str:
        return self._without_lead(self._settle_run())

    def end(self) -> str:
        return self._without_lead(self._end_run())

    def _feed_byte(self, byte: bytes) -> str:
        if self._spoilt:
            return _REPLACEMENT
        self._run += byte
        try:
            self._complete, _ = codecs.utf_8_decode(self._run, "strict", False)
        except UnicodeDecodeError:
            self._spoilt = True
            return self._take_run(_REPLACEMENT * len(self._run))
        return self._settle_run() if len(self._run) >= _LONGEST_RUN else ""

    def _settle_run(self) -> str:
        rest = self._run[len(self._complete.encode()) :]
        text = self._take_run(self._complete)
        self._run = rest
        return text

    def _end_run(self) -> str:
        self._spoilt = False
        if not self._run:
            return ""
        whole = self._complete.encode() == self._run
        return self._take_run(self._complete if whole else _REPLACEMENT * len(self._run))

    def _take_run(self, text: str) -> str:
        self._run, self._complete = b"", ""
        return text

    def _lead_of(self, text: str) -> int:
        """How many characters at the start of `text` are still to be taken away."""
        count = 0
        while count < self._max_lead and text.startswith(self._lead, count):
            count += 1
        return count

    def _without_lead(self, text: str) -> str:
        if not self._max_lead or not text:
            return text
        count = self._lead_of(text)
        self._max_lead = self._max_lead - count if count == len(text) else 0
        return text[count:]


class _WindowText:
    """Tokens mean what the decoder makes of them beside the tokens whose text came last.

    Exact for decoders that look no further than the neighbouring token and treat the first one apart.
    """

    tentative = ""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._context: list[int] = []  # the tokens of the last text returned; at first, the first tokens
        self._before = ""  # their text
        self._pending: list[int] = []  # the tokens after them, whose text ends in an incomplete character

    def feed(self, token: int) -> str:
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if text.endswith(_REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._advance(text)

    def settle(self) -> str:
        return ""

    def end(self) -> str:
        return self._advance(self._decode(self._context + self._pending))

    def _advance(self, text: str) -> str:
        new = text[len(self._before) :]
        if new or not self._context:
            self._context, self._before = self._pending, self._decode(self._pending)
        self._pending = []
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)
