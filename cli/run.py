"""`minisgl run`: answer the prompts of the command line, of stdin or of a file."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_doc import Doc
from rich.console import Console

from minisgl.config import EngineConfig, SamplingParams, check_types
from minisgl.results import cost_of

from .batch import answer_file
from .terminal import LogConfig, Meter, progress, say, start_logging

if TYPE_CHECKING:
    from minisgl.llm import LLM
    from minisgl.results import Completion, RequestOutput


Input = str | list[int]
"""A prompt as the model gets it: token ids where it has no tokenizer."""


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Prompts and answers"""

    raw: Annotated[bool, Doc("Give the prompt to the model as it is, without its chat template.")] = False
    system: Annotated[str | None, Doc("System message to put before the prompt.")] = None
    lines: Annotated[bool, Doc("Take every line of stdin as a prompt; empty ones are skipped.")] = False
    json: Annotated[bool, Doc("Print each prompt's result as one JSON object on a line.")] = False
    input: Annotated[str | None, Doc("File of requests to answer, in OpenAI's batch format: JSON lines.")] = None
    output: Annotated[
        str | None, Doc("File for the results of --input; what it has already is not done again. Default: stdout.")
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.raw and self.system is not None:
            raise ValueError("system is part of the chat template, which raw leaves out: set only one of them")
        for name in ("raw", "system", "lines", "json"):
            if self.input is not None and getattr(self, name):
                raise ValueError(f"{name} is for prompts; each row of input says for itself what it asks")
        for name in ("input", "output"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must be a file's path, got an empty text")


def run(
    form: PromptConfig,
    sampling: SamplingParams,
    config: EngineConfig,
    logs: LogConfig,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Text to answer, or several; none, or -, reads it from stdin."),
    ] = None,
) -> None:
    """Answer prompts.

    The answers go to stdout, all else to stderr. One answer is shown as it comes; several are worked on together,
    shown in order, and parted by an empty line. A file of requests is answered in whatever order they finish, and
    the same command again goes on where it was stopped.
    """
    console = start_logging(logs)
    load = partial(start, config, console)
    if form.input is not None:
        if prompts:
            raise typer.BadParameter("input takes the place of prompts", param_hint="PROMPT")
        target = None if form.output is None else Path(form.output)
        raise typer.Exit(0 if answer_file(Path(form.input), target, sampling, console, load) else 1)
    if form.output is not None:
        raise typer.BadParameter("output is for the results of --input; answers go to stdout", param_hint="--output")
    texts = _texts(prompts or [], form.lines)
    with load() as llm:
        answer(llm, texts, form, sampling, console)


def _texts(words: Sequence[str], lines: bool) -> list[str]:
    """The prompts: of the command line, and in the place of `-`, or without any, of stdin."""
    if not words and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give one, or - to read it from stdin", param_hint="PROMPT")
    if lines and words and "-" not in words:
        raise typer.BadParameter("lines is for prompts from stdin, and these are arguments", param_hint="--lines")
    prompts = [text for word in words or ["-"] for text in (_from_stdin(lines) if word == "-" else [word])]
    if not prompts:
        raise typer.BadParameter("stdin has no prompt", param_hint="PROMPT")
    if "" in prompts:
        raise typer.BadParameter(f"prompt {prompts.index('') + 1} is empty", param_hint="PROMPT")
    return prompts


def _from_stdin(lines: bool) -> list[str]:
    """All of it as one prompt, without the newline at its end; or the lines that are not empty."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"stdin is not UTF-8: {error}", param_hint="PROMPT") from error
    if lines:
        return [line for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    return [text.removesuffix("\n").removesuffix("\r")]


def start(config: EngineConfig, console: Console) -> "LLM":
    """Load the model, which may download it first."""
    from minisgl.llm import LLM  # not before the options are known to be right: it brings torch

    with progress(console) as report:
        return LLM.from_config(config, report)


def answer(llm: "LLM", prompts: list[str], form: PromptConfig, sampling: SamplingParams, console: Console) -> None:
    """Print the answers, in order, and then what they cost."""
    inputs = [_encode(llm, prompt, form) for prompt in prompts]
    began = time.perf_counter()
    if len(inputs) == 1 and sampling.n in (None, 1) and not form.json:
        outputs = [_stream(llm, inputs[0], sampling)]
    else:
        outputs = _answer_all(llm, prompts, inputs, form, sampling, console)
    say(console, str(cost_of(outputs, time.perf_counter() - began)))
    answers = [completion for output in outputs for completion in output.outputs]
    if failed := sum(completion.finish_reason == "error" for completion in answers):
        raise ValueError(f"{failed} of {len(answers)} answers ended early: the model's scores were not finite numbers")


def _answer_all(
    llm: "LLM", prompts: list[str], inputs: list[Input], form: PromptConfig, sampling: SamplingParams, console: Console
) -> list["RequestOutput"]:
    """Print each answer as soon as it and those before it are there."""
    for each in inputs:
        llm.check(each, sampling)
    outputs: dict[int, RequestOutput] = {}
    shown = 0
    with Meter(console, len(inputs), llm) as meter:
        for ended in llm.feed((each, sampling) for each in inputs):
            for number, output in ended:
                outputs[number] = output
                meter.advance(output)
            while shown in outputs:
                with meter.paused():
                    if form.json:
                        shown_as = {**dataclasses.asdict(outputs[shown]), "prompt": prompts[shown]}
                        print(json.dumps(shown_as, ensure_ascii=False))
                    else:
                        _print(llm, prompts, shown, outputs[shown], console)
                    sys.stdout.flush()
                shown += 1
            meter.show()
    return [outputs[number] for number in range(len(inputs))]


def _encode(llm: "LLM", prompt: str, form: PromptConfig) -> Input:
    if llm.tokenizer is None:
        if form.system is not None:
            raise ValueError("system needs a tokenizer, which this model does not have")
        try:
            return [int(word) for word in prompt.split()]
        except ValueError:
            raise ValueError(f'this model has no tokenizer: give token ids, like "1 2 3", not {prompt!r}') from None
    if form.raw:
        return prompt
    system = [] if form.system is None else [{"role": "system", "content": form.system}]
    return llm.chat_prompt([*system, {"role": "user", "content": prompt}])


def _stream(llm: "LLM", prompt: Input, sampling: SamplingParams) -> "RequestOutput":
    begun, output = False, None
    try:
        for piece in llm.stream(prompt, sampling):
            begun = begun or bool(piece.text)
            print(piece.text, end="", flush=True)
            output = piece.output
    finally:
        if begun:
            print()  # after Ctrl-C too: the shell's prompt starts on a line of its own
    assert output is not None, "the last piece carries the output"
    if not begun:
        print(_text(llm, output.outputs[0]))
    return output


def _print(llm: "LLM", prompts: Sequence[str], number: int, output: "RequestOutput", console: Console) -> None:
    """A prompt's answers: with a line above each where there are several, an empty line between prompts."""
    if number:
        print()
    if len(prompts) > 1 and console.is_terminal and sys.stdout.isatty():
        sys.stdout.flush()
        console.print(f"> {prompts[number]}", style="dim", markup=False, highlight=False)
    count = len(output.outputs)
    for completion in output.outputs:
        if count > 1:
            print(f"--- answer {completion.index + 1} of {count}")
        print(_text(llm, completion))


def _text(llm: "LLM", completion: "Completion") -> str:
    return completion.text if llm.tokenizer else " ".join(map(str, completion.token_ids))
