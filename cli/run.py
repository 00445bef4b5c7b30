"""`minisgl run`: answer the prompts of the command line."""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from annotated_doc import Doc
from rich.console import Console

from minisgl.config import EngineConfig, SamplingParams, check_types

from .terminal import LogConfig, progress, start_logging

if TYPE_CHECKING:
    from minisgl.llm import LLM, RequestOutput


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """Prompt"""

    raw: Annotated[bool, Doc("Give the prompt to the model as it is, without its chat template.")] = False
    system: Annotated[str | None, Doc("System message to put before the prompt.")] = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.raw and self.system is not None:
            raise ValueError("system is part of the chat template, which raw leaves out: set only one of them")


def run(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Text to answer; may be given several times.")],
    form: PromptConfig,
    sampling: SamplingParams,
    config: EngineConfig,
    logs: LogConfig,
) -> None:
    """Answer prompts.

    The answers go to stdout, all else to stderr. One answer is shown as it comes; several are worked on together,
    shown in order, and parted by an empty line.
    """
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise typer.BadParameter(f"prompt {number} is empty", param_hint="PROMPT")
    console = Console(stderr=True)
    start_logging(console, logs)
    with start(config, console) as llm:
        answer(llm, prompts, form, sampling, console)


def start(config: EngineConfig, console: Console) -> "LLM":
    """Load the model, which may download it first."""
    from minisgl.llm import LLM  # not before the options are known to be right: it brings torch

    with progress(console) as report:
        return LLM.from_config(config, report)


def answer(llm: "LLM", prompts: Sequence[str], form: PromptConfig, sampling: SamplingParams, console: Console) -> None:
    """Print the answers, in order, and then what they cost."""
    inputs = [_encode(llm, prompt, form) for prompt in prompts]
    began = time.perf_counter()
    if len(inputs) == 1:
        outputs = [_stream(llm, inputs[0], sampling)]
    else:
        outputs = llm.generate(inputs, sampling, progress=console.is_terminal)
        _print_all(llm, prompts, outputs, console)
    console.print(_cost(outputs, time.perf_counter() - began), style="dim", highlight=False, soft_wrap=True)


def _encode(llm: "LLM", prompt: str, form: PromptConfig) -> str | list[int]:
    if llm.tokenizer is None:
        return _token_ids(prompt, form)
    if form.raw:
        return prompt
    system = [] if form.system is None else [{"role": "system", "content": form.system}]
    return llm.chat_prompt([*system, {"role": "user", "content": prompt}])


def _token_ids(prompt: str, form: PromptConfig) -> list[int]:
    if form.system is not None:
        raise ValueError("system needs a tokenizer, which this model does not have")
    try:
        return [int(word) for word in prompt.split()]
    except ValueError:
        raise ValueError(f'this model has no tokenizer: a prompt is token ids, like "1 2 3", not {prompt!r}') from None


def _stream(llm: "LLM", prompt: str | list[int], sampling: SamplingParams) -> "RequestOutput":
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
        print(_text(llm, output))
    return output


def _print_all(llm: "LLM", prompts: Sequence[str], outputs: Sequence["RequestOutput"], console: Console) -> None:
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if number:
            print()
        if console.is_terminal and sys.stdout.isatty():
            sys.stdout.flush()
            console.print(f"> {prompt}", style="dim", markup=False, highlight=False)
        print(_text(llm, output))


def _text(llm: "LLM", output: "RequestOutput") -> str:
    return output.text if llm.tokenizer else " ".join(map(str, output.outputs[0].token_ids))


def _cost(outputs: Sequence["RequestOutput"], elapsed_s: float) -> str:
    """One line; of several prompts the median TTFT, and the rate of all together."""
    tokens_in = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    parts = [f"tokens in {tokens_in} (cached {cached})", f"out {tokens_out}"]
    if waits_s := [output.timing.ttft_s for output in outputs if output.timing.ttft_s is not None]:
        parts.append(f"TTFT {statistics.median(waits_s) * 1e3:.0f} ms")
    rate = outputs[0].timing.decode_tokens_per_s if len(outputs) == 1 else tokens_out / elapsed_s
    if rate is not None:
        parts.append(f"{rate:.1f} tok/s")
    return ", ".join(parts)
