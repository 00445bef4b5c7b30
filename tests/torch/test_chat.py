"""`minisgl chat` on an engine process of its own, with a tiny model: in a terminal, in a pipe, and when it dies."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from made_tokenizers import bytes_alone
from server_process import ENVIRONMENT, MINISGL, children_of, is_alive, kill, wait_for
from terminal import Terminal

from minisgl.bench import nvml
from minisgl.bench.record import GpuSample
from minisgl.chat.local import OwnEngine
from minisgl.config import EngineConfig, SamplingParams
from minisgl.openai.conversation import Turn

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}{% endfor %}<s>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
)
ARGUMENTS = ("--temperature", "0", "--ignore-eos", "--device", "cpu", "--dtype", "float32", "--num-pages", "400")


@pytest.fixture(scope="module")
def folder(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are bytes, with a chat template."""
    made = tmp_path_factory.mktemp("tiny")
    for file in tiny_model("LlamaForCausalLM", max_position_embeddings=4096).iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    bytes_alone().save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def engine_of(terminal: Terminal) -> int:
    """The process id of its engine, once that is ready."""
    (pid,) = children_of(terminal.process.pid)
    return pid


def test_a_session_on_an_engine(folder: Path, tmp_path: Path):
    sockets = tmp_path / "s"
    sockets.mkdir()
    command = (*MINISGL, "chat", str(folder), *ARGUMENTS)
    environment = {"XDG_STATE_HOME": str(tmp_path), "TMPDIR": str(sockets)}
    with Terminal(command, columns=100, **environment) as terminal:
        terminal.wait_for(f"(?s)^> ?$.*loading {re.escape(str(folder))[:30]}")
        terminal.type("Hello, who are you today?\r")  # before anything can answer it
        terminal.wait_for("today.\n.*\n.{20}")
        terminal.type("\x03")
        terminal.wait_for(r"tokens in 42, out \d+, TTFT \d+ ms, [\d.]+ tok/s; stopped")
        terminal.type("/set max_tokens 8\r")
        terminal.wait_for("^max_tokens: 8")
        terminal.type("/regen\r")
        terminal.wait_for(r"tokens in 42 \(cached \d\d\), out 8, TTFT .*; cut at max_tokens")
        terminal.type("/fork 0\r")
        terminal.wait_for("^0 turns")
        terminal.type("Hello, who are you tomorrow?\r")
        terminal.wait_for(r"tokens in 45 \(cached 16\), out 8, ")
        terminal.type("/tokens\r")
        terminal.wait_for(r"(?s)1 .* \d+%.* 8 .* \d+%")
        terminal.type("/logprobs 1\r")
        terminal.wait_for(r"-\d\.\d\d\d +\*")
        terminal.type(f"/save {tmp_path}/chat.json\r")
        terminal.wait_for("^saved in")

        first = engine_of(terminal)
        terminal.type("/set max_tokens 4000\r/set ignore_eos true\rA long story\r")
        terminal.wait_for("A long story\n.{30}")
        kill(first, signal.SIGKILL)
        terminal.wait_for("^Error: the engine has died: signal SIGKILL$")
        terminal.wait_for("the conversation is kept, and /regen asks again")
        terminal.type("/set max_tokens 5\r/regen\r")
        terminal.wait_for(r"^the engine has died: signal SIGKILL; this is a new one; tokens in \d+ \(cached 0\), out 5")
        second = engine_of(terminal)
        assert second != first
        kill(second, signal.SIGKILL)  # while nothing is asked
        wait_for(lambda: not is_alive(second), "its end")
        terminal.type("/tokens\r")
        terminal.wait_for("^the engine has died: signal SIGKILL; starting a new one …")
        terminal.wait_for("(?s)starting a new one.*^/logprobs N shows")
        terminal.type("And now?\r")
        terminal.wait_for(r"(?s)And now\?.*\(cached \d+\), out 5")
        assert "loading" not in terminal.settle().splitlines()[-1]
        third = engine_of(terminal)
        terminal.type("\x04")
        assert terminal.wait_for_the_end() == 0
        assert "Traceback" not in terminal.text
    wait_for(lambda: not is_alive(third), "the engine's end")
    assert [*sockets.glob("minisgl-*")] == []
    saved = json.loads((tmp_path / "chat.json").read_bytes())
    assert [message["content"] for message in saved["messages"][:1]] == ["Hello, who are you tomorrow?"]


def piped(text: str, *arguments: str) -> tuple[int, str, str]:
    command = [*MINISGL, "chat", *arguments]
    done = subprocess.run(command, input=text, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_pipe_gets_the_answer_and_a_full_context_its_numbers(folder: Path):
    lines = f"Hi\n{'word ' * 5}\n/drop 1\n/think\n/clear\nHm\n/show thinking\n"
    code, out, err = piped(lines, str(folder), *ARGUMENTS, "--max-model-len", "64", "--max-tokens", "20")
    assert code == 1 and "\x1b" not in out + err
    assert re.search(r"tokens in 19 \(cached 0\), out 20, TTFT \d+ ms, [\d.]+ tok/s; cut at max_tokens", err)
    assert re.search(r"Error: the prompt has \d+ tokens; the context holds 64", err)
    assert "the context is full: /drop 1 makes room, /clear begins anew" in err
    assert err.count("TTFT") == 3 and "cut at max_tokens" in err.splitlines()[-2], "all was thought"


def test_a_model_without_a_chat_template_is_refused_with_a_way_out(folder: Path, tmp_path: Path):
    for file in folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code, out, err = piped("Hi\n", str(tmp_path), *ARGUMENTS)
    assert (code, out) == (1, "")
    assert "Error: the model has no chat template" in err and "Traceback" not in err


def test_a_model_that_cannot_be_taken_leaves_the_old_one(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    copy, bare = shutil.copytree(folder, tmp_path / "copy"), shutil.copytree(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()

    async def talk() -> None:
        plain = EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=400)
        engine = OwnEngine(plain, lambda *_: None)

        async def ask() -> Turn:
            turn, sampling = Turn(question="Hi", model=engine.name), SamplingParams(max_tokens=3, ignore_eos=True)
            async for part in engine.answer([{"role": "user", "content": "Hi"}], sampling, None):
                turn.add(part)
            return turn

        try:
            await engine.ready()
            turn, client = await ask(), engine._client
            with pytest.raises(ValueError, match="typo"):
                await engine.use(str(tmp_path / "typo"))
            assert engine._client is client and len(await engine.score(turn)) == 3, "it is still the same engine"
            with pytest.raises(ValueError, match="no chat template"):
                await engine.use(str(bare))
            assert len((await ask()).token_ids) == 3 and engine.name == turn.model
            await engine.use(str(copy))
            assert (await engine.facts())["model"] == str(copy)
            with pytest.raises(ValueError, match="not made by this engine"):
                await engine.score(turn)
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(talk(), 60))


class Gpus:
    """One that takes 100 W."""

    def read(self) -> list[GpuSample]:
        now_s = time.monotonic()
        return [GpuSample(time_s=now_s, gpu=0, power_w=100.0, energy_mj=int(now_s * 100_000))]


def test_an_answer_tells_the_energy_that_the_gpus_took(folder: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(nvml, "LEAST_STRETCH_S", 0.0)

    async def ask() -> tuple[int, float, float]:
        engine = OwnEngine(
            EngineConfig(model=str(folder), device="cpu", dtype="float32", num_pages=400), lambda *_: None
        )
        try:
            await engine.ready()
            engine.gpus = Gpus()
            sampling = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
            began_s = time.monotonic()
            *_, last = [part async for part in engine.answer([{"role": "user", "content": "Hi"}], sampling, None)]
            assert last.end and last.end.joules and last.end.tokens_out
            return last.end.tokens_out, last.end.joules, time.monotonic() - began_s
        finally:
            await engine.close()

    tokens, joules, took_s = asyncio.run(asyncio.wait_for(ask(), 60))
    assert tokens == 300
    assert 0 < joules <= 100 * took_s
