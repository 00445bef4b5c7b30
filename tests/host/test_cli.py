"""The `minisgl` command as a process: output, exit codes, signals; and `run` on an LLM without a model."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from rich.console import Console

from cli.run import PromptConfig, answer
from cli.terminal import Meter, progress
from minisgl import __version__
from minisgl.config import SamplingParams

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("MINISGL_")} | {"PYTHONPATH": str(ROOT)}
MAIN = (sys.executable, "-c", "import sys; from cli.main import main; sys.exit(main())")


def fake(mode: str) -> tuple[str, ...]:
    return (sys.executable, str(ROOT / "tests/host/fake_llm.py"), mode)


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env=ENVIRONMENT | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def minisgl(*command: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with start(*command, **environment) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_version_is_the_version_of_the_package():
    assert minisgl(*MAIN, "--version") == (0, f"minisgl {__version__}\n", "")


def test_no_arguments_show_the_help_with_the_commands():
    code, out, err = minisgl(*MAIN)
    assert (code, err) == (0, "")
    assert out.rstrip() == minisgl(*MAIN, "--help")[1].rstrip()
    assert "run" in out and "Answer prompts" in out


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"], ["run", "x", "--tp", "x"]])
def test_help_and_refusals_import_nothing_heavy(arguments: list[str]):
    heavy = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "huggingface_hub", "gguf", "jinja2")
    script = (
        "import sys; from cli.main import main; main(sys.argv[1:]); "
        f"print('heavy:', [name for name in {heavy} if name in sys.modules])"
    )
    assert "heavy: []" in minisgl(sys.executable, "-c", script, *arguments)[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "PROMPT"),
        (["hi", "there", ""], "prompt 3 is empty"),
        (["-"], "prompt 1 is empty"),
        (["--lines"], "stdin has no prompt"),
        (["hi", "--lines"], "lines is for prompts from stdin"),
        (["hi", "--temprature", "1"], "--temperature"),
        (["hi", "--tp", "x"], "--tp: tp must be a whole number, got 'x'"),
        (["hi", "--raw", "--system", "x"], "--system"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_line_of_what_is_wrong(arguments: list[str], part: str):
    code, out, err = minisgl(*MAIN, "run", *arguments)
    assert (code, out) == (2, "")
    assert part in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("value", "Error: tp must be 1 here"),
        ("disk", "Error: [Errno 28] No space left on device"),
        ("package", "Error: this needs: pip install something"),
    ],
)
def test_an_error_ends_with_1_and_one_line(mode: str, line: str):
    assert minisgl(*fake(mode), "run", "hi") == (1, "", f"{line}\n")


@pytest.mark.parametrize(("arguments", "debug"), [((), "1"), (("--log-level", "debug"), "")])
def test_who_debugs_sees_the_traceback_too(arguments: Sequence[str], debug: str):
    code, _, err = minisgl(*fake("value"), "run", "hi", *arguments, MINISGL_DEBUG=debug)
    assert code == 1
    assert "Traceback" in err and err.endswith("Error: tp must be 1 here\n")


def test_a_fault_of_ours_shows_its_traceback():
    code, _, err = minisgl(*fake("fault"), "run", "hi")
    assert code == 1
    assert "Traceback" in err and err.endswith("RuntimeError: a fault of ours\n")


def test_an_error_in_mid_answer_leaves_a_whole_line_and_closes_the_engine():
    code, out, err = minisgl(*fake("broken"), "run", "hi", "--raw")
    assert (code, out) == (1, "HI \n")
    assert err == "closed\nError: the engine says no\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_loads_ends_it_without_a_traceback(number: signal.Signals, code: int):
    with start(*fake("hanging"), "run", "hi") as process:
        assert process.stderr and process.stderr.readline() == "loading\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (code, "", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_answer_closes_the_engine(number: signal.Signals, code: int):
    with start(*fake("endless"), "run", "hi") as process:
        assert process.stdout and process.stdout.readline() == "0\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "closed\n")


def test_a_signal_at_the_very_start_ends_it_without_a_traceback():
    # as the first import of the app would: the signal comes before Typer is there
    script = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from cli.main import main\n"
        "sys.exit(main())"
    )
    assert minisgl(sys.executable, "-c", script, "--help") == (130, "", "")


@pytest.mark.parametrize("arguments", [("run", "hi"), ("run", "hi", "ho"), ("run", "hi", "--json")])
def test_an_answer_that_the_model_could_not_give_is_an_error(arguments: tuple[str, ...]):
    code, _, err = minisgl(*fake("nan"), *arguments)
    assert code == 1
    assert err.splitlines()[-2:] == [
        "closed",
        f"Error: {len(arguments) - 1 - ('--json' in arguments)} of {len(arguments) - 1 - ('--json' in arguments)} "
        "answers ended early: the model's scores were not finite numbers",
    ]


@pytest.mark.parametrize("arguments", ["--version", "--help", "run hi"])
def test_closed_streams_are_no_fault(arguments: str):
    for closed in (">&-", "2>&-"):
        command = f"{' '.join(map(shlex.quote, fake('text')))} {arguments} {closed}"
        result = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
        assert result.returncode == 0 and "Traceback" not in result.stdout + result.stderr


def test_a_character_that_the_terminal_lacks_is_replaced():
    assert minisgl(*fake("text"), "run", "--raw", "é", PYTHONIOENCODING="ascii")[:2] == (0, "? \n")


def test_a_reader_that_leaves_early_is_no_error():
    with start(*fake("endless"), "run", "hi") as process:
        assert process.stdout and process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr and process.stderr.read() == "closed\n"
    assert process.wait(60) == 1


def test_a_reader_that_never_reads_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run([*MAIN, "--help"], env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert result.stderr == b""


# Prompts from stdin


def piped(text: bytes, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of `run --raw` on the fake LLM, which answers in capitals."""
    command = [*fake("text"), "run", "--raw", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, input=text, capture_output=True, check=False, timeout=60)
    return done.returncode, done.stdout.decode()


@pytest.mark.parametrize(
    ("text", "arguments", "out"),
    [
        (b"two\nlines\n", (), "TWO\nLINES \n"),
        (b"one\r\n", ("-",), "ONE \n"),
        (b"one\n\n  \ntwo\r\nthree", ("--lines",), "ONE\n\nTWO\n\nTHREE\n"),
        (b"b\nc\n", ("a", "-", "d", "--lines"), "A\n\nB\n\nC\n\nD\n"),
        (b"not read", ("a",), "A \n"),
        ("a\u2028b\n".encode(), ("--lines",), "A\u2028B \n"),
    ],
)
def test_prompts_come_from_stdin_whole_or_line_by_line(text: bytes, arguments: tuple[str, ...], out: str):
    assert piped(text, *arguments) == (0, out)


def test_stdin_that_is_no_text_is_wrong_usage():
    assert piped(b"\xff") == (2, "")


def test_a_closed_stdin_is_no_prompt():
    command = f"exec {sys.executable} -c 'import sys; from cli.main import main; sys.exit(main())' run <&-"
    done = subprocess.run(["sh", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "give one, or - to read it from stdin" in done.stderr


# `run` itself


def answers(llm: FakeLLM, *prompts: str, n: int | None = None, **form: Any) -> str:
    """What is said beside the answers, which go to stdout."""
    said = io.StringIO()
    answer(llm, prompts, PromptConfig(**form), SamplingParams(n=n), Console(file=said))  # type: ignore[arg-type]
    return said.getvalue()


def test_several_answers_to_a_prompt_have_a_line_above_each(capsys: pytest.CaptureFixture[str]):
    said = answers(FakeLLM(), "a", "b", n=2, raw=True)
    first, second = "--- answer 1 of 2\n", "--- answer 2 of 2\n"
    assert capsys.readouterr().out == f"{first}A\n{second}A\n\n{first}B\n{second}B\n"
    assert "out 12, " in said


def test_json_is_a_line_for_each_prompt_in_their_order(capsys: pytest.CaptureFixture[str]):
    answers(FakeLLM(), "a", "ü", json=True)
    answers(FakeLLM(), "alone", json=True, n=2)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["a", "ü", "alone"]
    result = json.loads(lines[2])
    assert result.keys() == {
        *("request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "cached_tokens", "outputs", "timing")
    }
    assert result["outputs"][1] == {
        "index": 1,
        "text": "<USER> ALONE",
        "token_ids": [97, 98, 99],
        "finish_reason": "stop",
        "stop_reason": None,
        "logprobs": None,
    }


def test_an_answer_is_printed_as_soon_as_those_before_it_are(capsys: pytest.CaptureFixture[str]):
    printed: list[str] = []

    class Watching(FakeLLM):
        def feed(self, prompts: Any) -> Any:
            outputs = [self._output(prompt, sampling) for prompt, sampling in prompts]
            for number in (1, 0, 2):
                yield [(number, outputs[number])]
                printed.append(capsys.readouterr().out)

    answers(Watching(), "a", "b", "c", raw=True)
    assert printed == ["", "A\n\nB\n", "\nC\n"]


def test_one_answer_streams_and_a_closing_line_tells_what_it_cost(capsys: pytest.CaptureFixture[str]):
    said = answers(FakeLLM(), "two words", raw=True)
    assert capsys.readouterr().out == "TWO WORDS \n"
    assert said == "tokens in 2 (cached 1), out 3, TTFT 12 ms, 45.7 tok/s\n"


def test_several_answers_come_in_order_parted_by_an_empty_line(capsys: pytest.CaptureFixture[str]):
    said = answers(FakeLLM(), "one", "two and", "three", raw=True)
    assert capsys.readouterr().out == "ONE\n\nTWO AND\n\nTHREE\n"
    assert said.startswith("tokens in 4 (cached 3), out 9, TTFT 12 ms, ") and said.endswith(" tok/s\n")


def test_the_chat_template_is_applied_unless_raw_and_a_system_message_comes_first():
    llm = FakeLLM()
    answers(llm, "hi")
    answers(llm, "hi", system="Be brief.")
    answers(llm, "hi", raw=True)
    assert llm.asked == ["<user> hi", "<system> Be brief. <user> hi", "hi"]


def test_without_a_tokenizer_prompts_and_answers_are_token_ids(capsys: pytest.CaptureFixture[str]):
    llm = FakeLLM("ids")
    answers(llm, "1 2  3")
    answers(llm, "4", "5 6")
    assert llm.asked == [[1, 2, 3], [4], [5, 6]]
    assert capsys.readouterr().out == "97 98 99\n97 98 99\n\n97 98 99\n"


def test_without_a_tokenizer_text_is_refused():
    with pytest.raises(ValueError, match=r"no tokenizer: give token ids.*'hello'"):
        answers(FakeLLM("ids"), "hello")
    with pytest.raises(ValueError, match="system needs a tokenizer"):
        answers(FakeLLM("ids"), "1", system="Be brief.")


def test_an_empty_answer_is_an_empty_line(capsys: pytest.CaptureFixture[str]):
    class Silent(FakeLLM):
        def stream(self, prompt: Any, sampling: SamplingParams) -> Any:
            yield next(piece for piece in super().stream("", sampling) if piece.finished)

    answers(Silent(), "hi")
    assert capsys.readouterr().out == "\n"


# Logs and progress


def test_progress_away_from_a_terminal_is_one_line_as_each_thing_begins():
    said = io.StringIO()
    with progress(Console(file=said, width=20)) as report:
        for done in range(5):
            report("download of [a] long name", done, 4)
        report("import", 0, None)
    assert said.getvalue() == "download of [a] long name …\nimport …\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away():
    said = io.StringIO()
    with progress(Console(file=said, width=80, force_terminal=True)) as report:
        report("download [a]", 1, 4)
        report("download [a]", 2, 4)
    assert "download [a]" in said.getvalue() and "50%" in said.getvalue()
    assert said.getvalue().endswith("\x1b[1A\x1b[2K")  # up one line, and that line cleared


def test_the_meter_tells_how_far_it_is_and_how_the_engine_fares(monkeypatch: pytest.MonkeyPatch):
    said = io.StringIO()
    monkeypatch.setattr("time.monotonic", iter(range(0, 1000, 100)).__next__)  # always time for a line
    llm = FakeLLM()
    with Meter(Console(file=said, width=20), 4, llm) as meter:  # type: ignore[arg-type]
        llm.generated_tokens = 600
        meter.show()
        meter.advance(llm._output("a b", SamplingParams()))
        meter.advance()
    begun, first, second = said.getvalue().splitlines()
    assert begun == "0/4 requests, 2 tok/s, 2 running, 1 waiting, KV 20%, cache hits 75%"
    assert first.startswith("1/4 requests, ") and second.startswith("2/4 requests, ")
    assert (meter.tokens_in, meter.tokens_cached, meter.tokens_out) == (2, 1, 3)


def test_the_meter_is_a_bar_that_makes_room_for_answers_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    said = io.StringIO()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with Meter(Console(file=said, width=80, force_terminal=True), 4, FakeLLM()) as meter:  # type: ignore[arg-type]
        assert "0/4 requests" in said.getvalue()
        with meter.paused():
            assert said.getvalue().endswith("\x1b[1A\x1b[2K")  # up one line, and that line cleared
        assert not said.getvalue().endswith("\x1b[1A\x1b[2K")
    assert said.getvalue().endswith("\x1b[1A\x1b[2K")


def test_the_meter_is_shown_as_steps_go_by_but_not_at_every_one(monkeypatch: pytest.MonkeyPatch):
    said = io.StringIO()
    monkeypatch.setattr("time.monotonic", (tick / 10 for tick in range(1_000_000)).__next__)  # a step takes 0.1 s
    with Meter(Console(file=said, width=80), 4, FakeLLM()) as meter:  # type: ignore[arg-type]
        for _ in range(1000):
            meter.show()
    assert 5 <= len(said.getvalue().splitlines()) <= 10


@pytest.mark.parametrize("arguments", [["--version"], ["models", "--json"], ["run", "hi"]])
def test_a_variable_that_nothing_looks_at_is_warned_of_with_the_nearest(arguments: list[str], tmp_path: Path):
    variables = {"MINISGL_TEMPRATURE": "1", "MINISGL_KV_CACHE": "none", "MINISGL_CACHE": str(tmp_path), "MINISGL_": "x"}
    code, out, err = minisgl(*fake("text"), *arguments, **variables, MINISGL_DEBUG="", MINISGL_WHATEVER="1")
    assert code == 0 and out
    assert [line for line in err.splitlines() if "variable" in line] == [
        "Warning: MINISGL_ is not a variable of minisgl",
        "Warning: MINISGL_TEMPRATURE is not a variable of minisgl; did you mean MINISGL_TEMPERATURE?",
        "Warning: MINISGL_WHATEVER is not a variable of minisgl",
    ]


def test_the_log_level_holds_for_minisgl_and_spares_the_other_libraries():
    script = (
        "import logging\n"
        "from cli.terminal import LogConfig, start_logging\n"
        "start_logging(LogConfig(log_level='info'))\n"
        "logging.getLogger('minisgl.engine').info('ours')\n"
        "logging.getLogger('minisgl.engine').debug('too fine')\n"
        "logging.getLogger('httpx').info('theirs')\n"
        "logging.getLogger('httpx').warning('their warning')\n"
    )
    code, out, err = minisgl(sys.executable, "-c", script)
    assert (code, out) == (0, "")
    assert "ours" in err and "their warning" in err
    assert "too fine" not in err and "theirs" not in err
