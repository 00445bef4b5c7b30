"""Chat templates: from messages to the text of a prompt, as Hugging Face renders them."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Stands at the end of the message to continue while it is rendered. A template that trims its messages takes
# the space away, and so tells that the text before the mark is to be trimmed too.
_CONTINUE_MARK = "ContinueFromHere7d1f "


class ChatTemplate:
    """A model's chat templates by name, with the special tokens they may use as variables.

    They are the repository's code and so not trusted: they run in jinja2's sandbox, see
    https://huggingface.co/docs/transformers/chat_templating for what they expect to find there.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._compiled = functools.cache(self._compile)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation; further keyword arguments are variables of the template.

        `add_generation_prompt` opens the assistant's answer, which is the default; `continue_final_message` leaves
        the last message open instead, for the model to go on with it. Raises ValueError for messages that are not
        well formed, that the template refuses (with its own message), and for a template that fails.
        """
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt and continue_final_message exclude each other, both are true")
        if "messages" in variables:
            raise ValueError("messages cannot be given again as a variable of the chat template")
        conversation = _checked(messages)
        if continue_final_message:
            conversation[-1]["content"] += _CONTINUE_MARK
        template = self._compiled(self._choose(tools))
        try:
            text = template.render(
                self._special_tokens | variables,
                messages=conversation,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except _Refused as refused:
            raise ValueError(str(refused)) from None
        except Exception as error:  # a template is code: whatever it raises is the input's fault, not ours
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return _left_open(text) if continue_final_message else text

    def check(self) -> None:
        """Raise ValueError for a template that is broken."""
        for name in self._sources:
            self._compiled(name)

    def _choose(self, tools: object) -> str:
        """The name of the template to use."""
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        raise ValueError(f"no chat template is named default, only {', '.join(sorted(self._sources))}")

    def _compile(self, name: str) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControlExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self._sources[name])
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        except SyntaxError as error:  # what jinja2 does not notice itself: {% break %} outside of a loop
            raise ValueError(f"the chat template is broken: {error.msg}") from error


class _Refused(Exception):
    """What a template raises about messages that it cannot take."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes: a prompt is not a page."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A copy of well-formed messages, content as a string and no other value None."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r:.80}")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {index} must be an object with role and content, got {message!r:.80}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ValueError(f"message {index} must have a string as its role, got {role!r:.80}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"message {index} ({role}) has no content")
        content = _flat(message.get("content"), f"message {index} ({role})")
        conversation.append({k: v for k, v in message.items() if v is not None} | {"content": content})
    return conversation


def _flat(content: object, where: str) -> str:
    """The text of a message's content: a string, None, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}: content must be a string or a list of text parts, got {content!r:.80}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            what = f"one of type {kind!r}" if kind not in (None, "text") else f"{part!r:.80}"
            raise ValueError(f"{where}: only text parts are supported, {{'type': 'text', 'text': …}}, got {what}")
        texts.append(text)
    return "".join(texts)


def _left_open(text: str) -> str:
    """Cut a rendered conversation where its last message's own text ends."""
    mark = _CONTINUE_MARK.strip()
    before, found, after = text.rpartition(mark)
    if not found:
        raise ValueError("continue_final_message: the chat template does not show the last message's content")
    return before if after.startswith(" ") else before.rstrip()
