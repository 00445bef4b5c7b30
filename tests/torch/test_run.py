"""`minisgl run` as its user starts it: a process of its own, with the real default model."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.real_model
COMMAND = [sys.executable, "-m", "minisgl", "run"]
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9"}
COST = r"tokens in \d+ \(cached \d+\), out \d+, TTFT \d+ ms, [\d.]+ tok/s"


@pytest.fixture(scope="module", autouse=True)
def imported():
    """The model is here before any test counts on that."""
    from minisgl.source.hub import locate

    locate("smollm2")


def run(*args, **env):
    return subprocess.run(
        [*COMMAND, *args], capture_output=True, text=True, timeout=240, check=False, env={**os.environ, **env}
    )


def test_the_capital_of_france_without_network_and_without_another_import():
    done = run("What is the capital of France?", "--temperature", "0", "--max-tokens", "32", **OFFLINE)
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert re.fullmatch(COST, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr and "mport" not in done.stderr


def test_several_prompts_are_answered_in_order():
    done = run("Say hello.", "What is the capital of France?", "--temperature", "0", "--max-tokens", "12")
    assert done.returncode == 0
    first, second = done.stdout.split("\n\n", 1)
    assert "ello" in first and "Paris" in second


def test_a_raw_prompt_is_continued_and_a_stop_string_ends_it():
    done = run("--raw", "1, 2, 3, 4, 5,", "--temperature", "0", "--max-tokens", "12", "--stop", "8")
    assert done.returncode == 0 and done.stdout.rstrip("\n") == " 6, 7, "


def test_a_system_message_reaches_the_model():
    plain = run("Who are you?", "--temperature", "0", "--max-tokens", "16").stdout
    pirate = run("Who are you?", "--system", "You are Blackbeard.", "--temperature", "0", "--max-tokens", "16").stdout
    assert plain and pirate and plain != pirate


def test_lines_of_stdin_are_answered_in_order_as_json():
    args = [*COMMAND, "--lines", "--json", "-n", "2", "--max-tokens", "16", "--logprobs", "1", "--temperature", "0"]
    text = "What is the capital of France?\n\nWhat is the capital of Germany?\n"
    done = subprocess.run(args, input=text, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0
    france, germany = map(json.loads, done.stdout.splitlines())
    assert (
        france["prompt"] == "What is the capital of France?" and germany["prompt"] == "What is the capital of Germany?"
    )
    for result, city in ((france, "Paris"), (germany, "Berlin")):
        assert [answer["index"] for answer in result["outputs"]] == [0, 1]
        assert all(city in answer["text"] for answer in result["outputs"])
        assert all(len(answer["logprobs"]) == len(answer["token_ids"]) for answer in result["outputs"])


def test_a_file_of_requests_is_finished_by_the_same_command_after_ctrl_c(tmp_path):
    def chat(custom_id, question, **body):
        messages = [{"role": "user", "content": question}]
        body = {"model": "smollm2", "messages": messages, "temperature": 0, **body}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}

    rows = [
        chat("short", "What is the capital of France?", max_completion_tokens=16, logprobs=True, top_logprobs=2),
        chat("bad", "Hello", temperature=-1),
        chat("long", "word " * 9000),
        *(chat(f"slow {n}", f"Count to {n}.", ignore_eos=True, max_tokens=1500) for n in range(100, 104)),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows) + "not JSON\n")
    args = [*COMMAND, "--input", str(source), "--output", str(target), "--max-model-len", "2048"]

    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and not (target.exists() and target.read_text().count("\n") >= 3):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "line 8 is not JSON" in err and "the same command does the rest" in err and "Traceback" not in err
    results = {row["custom_id"]: row for row in map(json.loads, target.read_text().splitlines())}
    assert results.keys() == {"short", "bad", "long"}
    assert "temperature must be" in results["bad"]["error"]["message"]
    assert "the context holds 2048" in results["long"]["error"]["message"]
    (choice,) = results["short"]["response"]["body"]["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    logprobs = choice["logprobs"]["content"]
    shown = logprobs[:-1]  # the last token ended it
    assert b"".join(bytes(entry["bytes"]) for entry in shown).decode() == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)

    rows[1] = chat("bad", "Say hello.", max_tokens=8)
    rows[3:] = [chat(f"slow {n}", f"Count to {n}.", max_tokens=4) for n in range(100, 104)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open(target, "a") as file:
        file.write('{"id": "batch_req_0123", "custom_id": "slo')
    done = subprocess.run(args, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1 and "5 answered, 1 failed, 1 were there already; " in done.stderr
    after = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(row["custom_id"] for row in after) == sorted(row["custom_id"] for row in rows)
    assert [row["custom_id"] for row in after if row["error"]] == ["long"]
    assert after[0] == results["short"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_it_streams_keeps_what_came_and_ends_quietly(number, code):
    args = [*COMMAND, "Count to a thousand.", "--ignore-eos", "--temperature", "0"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert first and rest.endswith(b"\n")
    assert process.returncode == code and b"Traceback" not in errors


def test_a_reader_that_goes_away_is_no_error():
    args = [*COMMAND, "Write a poem.", "--temperature", "0", "--max-tokens", "40"]
    process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stderr is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        errors = process.stderr.read()
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert b"Traceback" not in errors and b"BrokenPipe" not in errors


def test_in_a_terminal_the_answer_streams_and_the_bar_is_gone():
    master, slave = pty.openpty()
    args = [*COMMAND, "What is the capital of France?", "--temperature", "0", "--max-tokens", "32"]
    process = subprocess.Popen(args, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    screen, end = b"", time.monotonic() + 120
    try:
        while time.monotonic() < end:
            if select.select([master], [], [], 1)[0]:
                try:
                    screen += os.read(master, 4096)
                except OSError:  # the other end is closed
                    break
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", screen).decode()
    assert process.returncode == 0
    assert "The capital of France is Paris." in text and re.search(COST, text)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("hello", "--model", "./not/here"), 1, r"there is no file or folder \S*not/here"),
        (("hello", "--tp", "2"), 1, r"tp=2: the model has 9 heads and 3 key heads: tp may be 1, 3 or 9"),
        (("hello", "--attention-backend", "flashinfer"), 1, r"flashinfer cannot do prefill here"),
        (("hello", "--max-model-len", "9000"), 1, r"max_model_len=9000.*at most 8192"),
        (("word " * 9000,), 1, r"the context holds 8192"),
        (("hello", "--max-tokens", "0"), 2, r"max_tokens must be at least 1"),
        (("hello", "--temperature", "-1"), 2, r"temperature must be"),
        ((), 2, r"Invalid value for PROMPT: "),
        (("--input", "./not/here"), 1, r"cannot read not/here: No such file"),
    ],
)
def test_wrong_input_is_one_clear_error_and_no_traceback(args, code, message):
    done = run(*args)
    assert done.returncode == code and done.stdout == ""
    assert re.search(message, re.sub(r"[\s│]+", " ", done.stderr)), done.stderr
    assert "Traceback" not in done.stderr
