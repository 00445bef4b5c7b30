"""`minisgl chat` in a terminal, in a pipe, and in terminals that can do little; on a model that is none."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_chat import CODE
from server_process import ENVIRONMENT, ROOT
from terminal import Terminal

PROGRAM = (sys.executable, str(ROOT / "tests/host/fake_chat.py"))
ESCAPE = b"\x1b"


@pytest.fixture
def chat(tmp_path: Path) -> Iterator:
    """`chat(*arguments, mode=…, columns=…, **environment)`: the shell in a terminal, at its first prompt."""
    opened: list[Terminal] = []

    def start(*arguments: str, mode: str = "ready", columns: int = 80, lines: int = 24, **environment: str) -> Terminal:
        environment = {"XDG_STATE_HOME": str(tmp_path), "LOADED": str(tmp_path / "loaded"), **environment}
        opened.append(Terminal((*PROGRAM, mode, *arguments), columns, lines, **environment))
        opened[-1].wait_for("^> ?")
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.process.close(force=True)


def leave(terminal: Terminal) -> None:
    terminal.wait_for("(?s)> ?\n[^>]*\\Z|> ?\\Z")
    terminal.type("\x04")
    assert terminal.wait_for_the_end() == 0
    terminal.wait_for("^closed")


def piped(text: str, *arguments: str, mode: str = "ready", **environment: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the shell with lines in its stdin."""
    done = subprocess.run(
        [*PROGRAM, mode, *arguments],
        input=text.encode(),
        env=ENVIRONMENT | environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


# --- a terminal


def test_the_prompt_is_there_while_the_model_loads_and_a_question_waits_for_it(chat, tmp_path):
    terminal = chat(mode="loading")
    terminal.wait_for("^loading fake 25% …")
    terminal.type("good morning\r")
    terminal.wait_for(r"^loading fake 25% … \d+ s")
    (tmp_path / "loaded").touch()
    terminal.wait_for("^good morning\ntokens in 2")
    terminal.wait_for(r"^fake · 4 of 1000 tokens")
    assert "loading" not in terminal.settle()
    leave(terminal)


def test_a_question_that_waits_for_the_model_can_be_given_up(chat, tmp_path):
    terminal = chat(mode="loading")
    terminal.type("good morning\r")
    terminal.wait_for("> good morning\nloading fake 25% …")
    terminal.type("\x03")
    terminal.wait_for("^stopped; /regen asks again")
    (tmp_path / "loaded").touch()
    terminal.type("/regen\r")
    terminal.wait_for("^good morning\ntokens in 2")
    leave(terminal)


def test_a_model_that_cannot_be_loaded_ends_the_shell_with_one_line(chat):
    terminal = chat(mode="absent")
    terminal.type("not sent")
    assert terminal.wait_for_the_end() == 1
    assert terminal.text.splitlines()[-1] == "Error: fake is not here"


def test_markdown_comes_out_rendered_and_stays_above(chat):
    terminal = chat(lines=12)
    terminal.type("code\r")
    terminal.wait_for("tok/s")
    seen = terminal.settle()
    assert "def f(x):\n    return x  # same\n" in seen and "```" not in seen
    assert " • one\n • two\n" in seen and re.search("1 +日本", seen)
    terminal.type("long\r")
    terminal.wait_for("^line 60\ntokens in")
    seen = terminal.settle()
    assert re.findall(r"^line (\d+)$", seen, re.MULTILINE) == [str(n) for n in range(1, 61)]
    assert seen.count("def f(x):") == 1, "what has scrolled away is still there, once"
    leave(terminal)


def test_ctrl_c_stops_an_answer_and_keeps_what_came(chat):
    terminal = chat()
    terminal.type("endless\r")
    terminal.wait_for("word30 ")
    terminal.type("\x03")
    terminal.wait_for(r"tokens in 1, out \d+, TTFT \d+ ms, [\d.]+ tok/s; stopped")
    seen = terminal.settle()
    kept = re.findall(r"word\d+", seen)[-1]
    assert "^C" not in seen
    terminal.type("/show\r")
    terminal.wait_for("^turn 1 +endless")
    terminal.type(f"{kept}\r")  # a question after the stopped answer
    terminal.wait_for(rf"^{kept}\ntokens in \d+ \(cached \d+\), out 1")
    leave(terminal)


def test_at_the_prompt_ctrl_c_gives_up_the_line_and_ctrl_d_leaves(chat):
    terminal = chat()
    terminal.type("this is not what I")
    terminal.wait_for("not what I$")
    terminal.type("\x03")
    terminal.settle()
    terminal.type("/bye\r")
    assert terminal.wait_for_the_end() == 0
    assert "tokens in" not in terminal.text


def test_an_unknown_command_names_the_nearest_and_ends_nothing(chat):
    terminal = chat()
    terminal.type("/regne\r")
    terminal.wait_for("^Error: there is no /regne; did you mean /regen\\?")
    terminal.type("/xyzzy 1\r")
    terminal.wait_for("^Error: there is no /xyzzy; /help lists what there is")
    terminal.type(" /usr is a folder\r")  # a space before it: a question
    terminal.wait_for("^/usr is a folder\ntokens")
    leave(terminal)


def test_thoughts_are_seen_while_they_come_and_then_folded(chat):
    terminal = chat()
    terminal.type("think of it\r")
    terminal.wait_for(r"^thought for \d\.\d s; /show thinking shows it\n\nthink of it\n")
    assert re.search(rb"(?s)first this, then\x1b\[0m\r\n.*that, so:", terminal.raw)
    assert "first this" not in terminal.settle()
    terminal.type("/show thinking\r")
    terminal.wait_for("^first this, then\nthat, so:$")
    leave(terminal)


def test_several_lines_come_from_quotes_alt_enter_a_paste_and_the_editor(chat, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\necho 'from the editor' > \"$1\"\n")
    editor.chmod(0o755)
    terminal = chat(EDITOR=str(editor), VISUAL=str(editor))
    terminal.type('"""one\rtwo"""\r')
    terminal.wait_for("^one\ntwo\ntokens")
    terminal.settle()
    terminal.type("three\x1b\rfour\r")
    terminal.wait_for("^three\nfour\ntokens")
    terminal.settle()
    terminal.type("\x1b[200~five\nsix\x1b[201~\r")
    terminal.wait_for("^five\nsix\ntokens")
    terminal.settle()
    terminal.type("\x18\x05")
    terminal.wait_for("^from the editor\ntokens|> from the editor")
    leave(terminal)


def test_what_was_entered_is_there_in_the_next_session_and_only_for_its_user(chat, tmp_path):
    first = chat()
    first.type("remember me\r")
    first.wait_for("^remember me\ntokens")
    leave(first)
    assert (tmp_path / "minisgl").stat().st_mode & 0o777 == 0o700
    second = chat()
    second.type("\x1b[A")
    second.wait_for("^> remember me")
    second.type("\x03")
    leave(second)
    third = chat("--no-history")
    third.type("\x1b[A")
    assert "remember" not in third.settle()
    leave(third)


def test_a_history_that_cannot_be_kept_is_said_once(chat, tmp_path):
    (tmp_path / "minisgl/chat_history").mkdir(parents=True)
    terminal = chat(columns=200)
    terminal.type("one\r")
    terminal.wait_for("^one\ntokens")
    terminal.type("\x1b[A")
    terminal.wait_for("(?s)tokens.*^> one")
    terminal.type("\x03")
    leave(terminal)
    assert terminal.text.count("What is entered is not kept: ") == 1 and "Traceback" not in terminal.text


def test_tab_completes_commands_parameters_and_files(chat, tmp_path):
    (tmp_path / "a-file.txt").write_text("What the file says.")
    terminal = chat(columns=200)
    for keys, completed in (("/syst", "^> /system"), (" Be brief.\r", "^system  Be brief.")):
        terminal.type(keys + "\t" * (not keys.endswith("\r")))
        terminal.wait_for(completed)
        terminal.settle()
    terminal.type("/set tempera\t")
    terminal.wait_for("^> /set temperature")
    terminal.type(" 0.5\r")
    terminal.wait_for("^temperature: 0.5")
    terminal.settle()
    terminal.type(f"/read {tmp_path}/a-f\t")
    terminal.wait_for("a-file.txt")
    terminal.type("\r")
    terminal.wait_for("^a-file.txt, 19 characters, goes with your next question")
    terminal.wait_for("1 attached")
    terminal.type("and now?\r")
    terminal.wait_for("^a-file.txt:\n\nWhat the file says.\n\nand now\\?\ntokens in 9")
    leave(terminal)


def test_edit_brings_the_last_question_back_undo_its_answer_and_load_what_was_saved(chat, tmp_path):
    saved = tmp_path / "chat.json"
    terminal = chat()
    terminal.type("helo\r")
    terminal.wait_for("^helo\ntokens")
    terminal.type("/edit\r")
    terminal.wait_for("^> helo")
    terminal.settle()
    terminal.type("\x03")  # given up: nothing has changed
    terminal.settle()
    terminal.type("/show\r")
    terminal.wait_for("^turn 1 +helo")
    terminal.type("/edit\r")
    terminal.wait_for("(?s)turn 1.*^> helo")
    terminal.settle()
    terminal.type("\x7flo\r")
    terminal.wait_for("^hello\ntokens in 1 ")
    terminal.type(f"/save {saved}\r")
    terminal.wait_for("^saved in")
    for left in ("0 turns", "1 turn; the last one: helo", "0 turns"):
        terminal.settle()
        terminal.type("/undo\r")
        terminal.wait_for(f"(?s).*^{left}$")
    terminal.type("/undo\r")
    terminal.wait_for("^Error: there is nothing to undo")
    terminal.type(f"/load {saved}\r")
    terminal.wait_for("^1 turn; the last one: hello")
    leave(terminal)


def test_what_is_typed_during_an_answer_waits_for_the_prompt(chat):
    terminal = chat()
    terminal.type("a " * 60 + "\r")
    terminal.wait_for("^a a a")
    terminal.type("the next one\r")
    terminal.type("\x04")
    terminal.wait_for("^the next one\ntokens in")
    assert terminal.wait_for_the_end() == 0


@pytest.mark.parametrize("columns", [20, 120])
def test_narrow_and_wide_terminals_show_everything(chat, columns):
    terminal = chat(columns=columns)
    for question, part in (
        ("code", "def f(x):"),
        ("日本語の文章と中文字符です。" * 4, ""),
        ("/help", "/model"),
        ("/tokens", "0%"),
    ):
        terminal.type(f"{question}\r")
        terminal.settle()
        assert part in terminal.text
    assert max(len(line) for line in terminal.seen()) <= columns
    squeezed = re.sub(r"\s", "", terminal.text)
    assert squeezed.count("日本語の文章と中文字符です。" * 4) >= 1
    leave(terminal)


def test_a_terminal_that_becomes_narrower_loses_nothing(chat):
    terminal = chat(columns=100)
    terminal.type("endless\r")
    terminal.wait_for("word40 ")
    terminal.resize(60, 24)
    terminal.wait_for("word80 ")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    words = re.findall(r"word(\d+)", terminal.settle())
    assert {str(n) for n in range(80)} <= {*words}
    leave(terminal)


def test_a_text_moves_no_cursor_and_loses_no_part(chat):
    terminal = chat()
    terminal.type("escape\r")
    terminal.wait_for("before \N{REPLACEMENT CHARACTER}\\[2J.*after \N{REPLACEMENT CHARACTER} end")
    terminal.type("html\r")
    terminal.wait_for(re.escape("a <b>bold</b> word, <think>that</think> and !alt (http://image) stay"))
    leave(terminal)


def test_without_colours_there_are_none(chat):
    terminal = chat(NO_COLOR="1")
    terminal.type("code\r")
    terminal.wait_for("tok/s")
    terminal.type("/tokens\r")
    terminal.wait_for("0%")
    leave(terminal)
    colors = {
        int(code) for codes in re.findall(rb"\x1b\[([\d;]*)m", terminal.raw) for code in codes.split(b";") if code
    }
    assert not colors & {*range(30, 39), *range(40, 49), *range(90, 98)}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_and_the_engine_and_the_terminal_is_as_it_was(chat, number, code):
    terminal = chat()
    terminal.type("endless\r")
    terminal.wait_for("word10 ")
    terminal.process.kill(number)
    assert terminal.wait_for_the_end() == code
    terminal.wait_for("^closed")
    assert terminal.raw.rstrip().endswith(b"closed") and terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.rindex(
        b"\x1b[?25l"
    )
    assert terminal.process.getecho()


# --- terminals that can do little


def test_a_dumb_terminal_gets_no_escape_codes(chat):
    terminal = chat(TERM="dumb")
    terminal.type("code\r")
    terminal.wait_for("(?s)```python.*tok/s")
    terminal.type("escape\r")
    terminal.wait_for("after \N{REPLACEMENT CHARACTER} end")
    terminal.type("endless\r")
    terminal.wait_for("word20 ")
    terminal.type("\x03")
    terminal.wait_for("stopped")
    terminal.settle()
    terminal.type("given up\x03")
    terminal.settle()
    terminal.type("/show\r")
    terminal.wait_for("^turn 3 +endless")
    leave(terminal)
    assert ESCAPE not in terminal.raw


# --- pipes


def test_a_piped_question_is_answered_and_that_is_all():
    code, out, err = piped("hi there\n", TERM="xterm-256color", FORCE_COLOR="1")
    assert (code, out) == (0, "hi there\n")
    assert re.fullmatch(r"loading fake …\ntokens in 2 \(cached 1\), out 2, TTFT \d+ ms, [\d.]+ tok/s\nclosed\n", err)


def test_each_line_of_a_pipe_is_a_question_or_a_command():
    lines = 'first\n"""second\nand third"""\n\n/system Be brief.\n/fork 1\nlast'
    code, out, err = piped(lines)
    assert code == 0
    assert out == "first\nsecond\nand third\nsystem  Be brief.\nlast\n"
    assert "1 turn; the last one: first" in err
    assert piped("")[:2] == (0, "")
    assert piped('"""\nab\n\ncd')[:2] == (0, "ab\n\ncd\n"), "quotes that nobody closes end with the lines"


def test_markdown_in_a_pipe_stays_as_it_is():
    assert piped("code\n")[1] == CODE


def test_a_fault_in_a_pipe_is_an_exit_code():
    code, out, err = piped("broken in the middle\nnext\n")
    assert (code, out) == (1, "broken in\nnext\n")
    assert "Error: the engine has died: signal SIGKILL\n" in err
    assert piped("/nonsense\n")[0] == 1
    code, out, err = piped("unforeseen\nnext\n")
    assert (code, out) == (1, "next\n") and "Error: 'a fault of ours'" in err and "Traceback" not in err
    assert piped("hi\n", mode="absent")[::2] == (1, "loading fake …\nError: fake is not here\n")


def test_ctrl_c_ends_what_has_no_terminal():
    process = subprocess.Popen([*PROGRAM, "ready"], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    with process:
        process.stdin.write(b"endless\n")
        process.stdin.flush()
        assert process.stdout.read(30).startswith(b"word0 ")
        process.send_signal(signal.SIGINT)
        process.stdin.close()
        process.stdout.read()
    assert process.returncode == 130


def test_a_closed_stdin_is_an_empty_one():
    command = f"{' '.join(PROGRAM)} ready <&-"
    done = subprocess.run(["/bin/sh", "-c", command], env=ENVIRONMENT, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-n", "2"], "Error: n must be 1 and prompt_logprobs unset in a chat"),
        (["--load", "/nowhere.json"], "Error: [Errno 2] No such file or directory: '/nowhere.json'"),
        (
            ["--url", "http://x", "--dtype", "float32"],
            "Error: url is of a server, which has an engine of its own: leave out dtype",
        ),
        (["some/model", "--model", "other"], "give the model once"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, line):
    code, out, err = piped("hi\n", *arguments)
    assert (code != 0, out) == (True, "")
    assert line in err and "Traceback" not in err


def test_the_shell_imports_nothing_heavy():
    heavy = ("torch", "numpy", "tokenizers", "aiohttp", "transformers", "safetensors", "gguf", "jinja2")
    script = f"import sys, minisgl.chat.shell; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False
    )
    assert (done.stdout, done.stderr) == (b"[]\n", b"")
