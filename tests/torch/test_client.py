"""Engine processes of their own, on a tiny model: what comes back, and what is left when one of them dies."""

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import wraps
from pathlib import Path

import pytest
from server_process import ROOT, halt, is_alive

from minisgl import LLM, EngineClient, EngineConfig, SamplingParams
from minisgl.server import child
from minisgl.server.client import EngineDead
from minisgl.server.messages import EngineSettings

FOREVER = SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True)


@pytest.fixture
def config(tiny_model) -> EngineConfig:
    return EngineConfig(model=str(tiny_model("LlamaForCausalLM")), device="cpu", dtype="float32", num_pages=400)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path_factory):
    """Where sockets go: no client's own folder may stay there."""
    tmp_path_factory.getbasetemp()  # of other tests; not in the folder to come
    monkeypatch.setattr(tempfile, "tempdir", None)  # asks the environment anew
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as place:  # a socket's path must be short
        monkeypatch.setenv("TMPDIR", place)
        yield Path(place)
        assert list(Path(place).glob("minisgl-*")) == []


def in_loop(test):
    """Run an async test in an event loop of its own, for a minute at most."""

    @wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


async def gone(pid: int) -> None:
    while is_alive(pid):
        await asyncio.sleep(0.02)


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    processes, start = [], child.start

    async def seen(module, settings):
        processes.append(await start(module, settings))
        return processes[-1]

    monkeypatch.setattr(child, "start", seen)
    return processes


async def answer(client, prompt, params):
    pieces = [piece async for piece in client.generate(prompt, params)]
    output = pieces[-1].output
    for each in output.outputs:
        mine = [piece for piece in pieces if piece.index == each.index]
        assert [token for piece in mine for token in piece.token_ids] == each.token_ids
        if each.logprobs is not None:
            assert [score for piece in mine for score in piece.logprobs or []] == each.logprobs
    return replace(output, request_id=0, timing=None, cached_tokens=0)


@in_loop
async def test_an_engine_process_answers_as_an_llm_in_this_process(config):
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    work = [
        ([3, 4, 5], greedy),
        ([6] * 40, replace(greedy, logprobs=3, prompt_logprobs=2)),
        ([7, 8], replace(greedy, logprobs=0)),
        ([9, 9], SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, logprobs=2, top_p=0.9)),
        ([10], replace(greedy, frequency_penalty=1.5, logit_bias={5: 3.0}, min_tokens=4, stop_token_ids=[252, 247])),
        ([11, 12], replace(greedy, stop_token_ids=list(range(3, 320)), max_tokens=None)),
    ]
    with LLM.from_config(config) as llm:
        want = [
            replace(llm.generate([prompt], params)[0], request_id=0, timing=None, cached_tokens=0)
            for prompt, params in work
        ]
    async with await EngineClient.launch(config) as client:
        got = await asyncio.gather(*(answer(client, prompt, params) for prompt, params in work))
        for each, other in zip(got, want, strict=True):
            scores = [(o.prompt_logprobs, [a.logprobs for a in o.outputs]) for o in (each, other)]
            assert rounded(scores[0]) == rounded(scores[1])
            assert [(a.token_ids, a.finish_reason, a.stop_reason) for a in each.outputs] == [
                (a.token_ids, a.finish_reason, a.stop_reason) for a in other.outputs
            ]
            assert each.prompt_token_ids == other.prompt_token_ids
        stats = await client.stats()
        assert stats.running == stats.waiting == stats.pages_locked == 0
        again = [piece async for piece in client.generate([6] * 40, greedy)][-1].output
        assert again.cached_tokens == 32
        assert await client.flush_cache()
        again = [piece async for piece in client.generate([6] * 40, greedy)][-1].output
        assert again.cached_tokens == 0
        assert 'minisgl:num_requests_running{model_name="' in await client.metrics()


@in_loop
async def test_what_the_engine_process_fails_at_is_said_to_whoever_asked(config, tmp_path):
    folder = shutil.copytree(config.model, tmp_path / "model")
    async with await EngineClient.launch(replace(config, model=str(folder))) as client:
        (folder / "config.json").unlink()  # which a profile has in it
        with pytest.raises(RuntimeError, match="the engine process has failed at profile: its log says why"):
            await client.profile(5)
        assert await client.profile(0) is None
        assert (await client.stats()).running == 0


def rounded(value):
    """Numbers of batches of other shapes differ in their last bits."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {token: rounded(each) for token, each in value.items()}
    return value if value is None or isinstance(value, int) else rounded(vars(value))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "./no-such-folder"}, "there is no file or folder .*no-such-folder"),
        ({"max_model_len": 4096}, "max_model_len=4096: the model was made for at most 2048"),
        ({"tp": 3}, "tp=3: the model has 4 heads and 2 key heads: tp may be 1, 2 or 4"),
    ],
)
@in_loop
async def test_what_keeps_an_engine_from_starting_is_one_clear_line(config, wrong, message):
    with pytest.raises(ValueError, match=message) as caught:
        await EngineClient.launch(replace(config, **wrong))
    assert "\n" not in str(caught.value)


@in_loop
async def test_progress_is_reported_while_an_engine_starts(config):
    told = []
    async with await EngineClient.launch(config, lambda *line: told.append(line)):
        pass
    assert any(what.startswith("loading") and done == total for what, done, total in told)


@in_loop
async def test_an_engine_that_is_killed_ends_what_is_open_and_says_how(config, started):
    async with await EngineClient.launch(config) as client:
        stream = client.generate([3, 4, 5], FOREVER)
        await anext(stream)
        ticket = client.submit(client.prepare([5], FOREVER, stream=False))
        started[0].kill()
        with pytest.raises(EngineDead, match="signal SIGKILL"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead, match="signal SIGKILL"):
            await ticket.done
        with pytest.raises(EngineDead, match="signal SIGKILL"):
            await client.stats()


@in_loop
async def test_closing_in_the_middle_ends_streams_and_leaves_no_process(config, started):
    client = await EngineClient.launch(config)
    stream = client.generate([3, 4, 5], FOREVER)
    await anext(stream)
    await client.close()
    with pytest.raises(EngineDead, match="closed"):
        async for _ in stream:
            pass
    assert not is_alive(started[0].pid)
    await client.close()


@in_loop
async def test_an_engine_that_ignores_being_told_to_end_is_killed(config, started):
    client = await EngineClient.launch(config)
    halt(started[0].pid)
    await client.close()
    assert not is_alive(started[0].pid)


@in_loop
@pytest.mark.parametrize("level", [5, 25, 60])
async def test_an_engine_starts_at_any_level_of_logging(config, monkeypatch, level):
    monkeypatch.setattr(logging.getLogger("minisgl.server.client"), "level", level)
    async with await EngineClient.launch(config) as client:
        assert (await client.stats()).running == 0


@in_loop
async def test_closing_that_is_given_up_still_leaves_no_process(config, started, monkeypatch):
    monkeypatch.setattr(child, "END_S", 1000)
    client = await EngineClient.launch(config)
    halt(started[0].pid)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await gone(started[0].pid)


@in_loop
@pytest.mark.parametrize("times", [1, 2])
async def test_a_launch_that_is_given_up_leaves_no_process(config, started, times):
    launching = asyncio.create_task(EngineClient.launch(config))
    while not started:
        await asyncio.sleep(0.01)
    halt(started[0].pid)
    for _ in range(times):
        launching.cancel()
        await asyncio.sleep(0.1)
    with pytest.raises(asyncio.CancelledError):
        await launching
    await gone(started[0].pid)


@in_loop
async def test_a_folder_too_long_for_a_socket_is_told_before_anything_is_started(config, folder, started, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / ("x" * 100)))
    (folder / ("x" * 100)).mkdir()
    with pytest.raises(ValueError, match="set TMPDIR to a shorter folder"):
        await EngineClient.launch(config)
    assert started == []


def settings(config, folder, **changes):
    usual = {"max_queued_requests": 5, "served_names": ["tiny"], "log_interval_s": 0.0, "log_level": "warning"}
    return EngineSettings(address=f"ipc://{folder}/engine", config=asdict(config), **{**usual, **changes})


async def until_ready(process):
    async for report in child.reports(process):
        if report.kind == "ready":
            return report.facts
    raise AssertionError("it ended")


@in_loop
async def test_a_worker_shows_that_it_lives_ignores_ctrl_c_and_ends_with_its_owners_line(config, folder):
    process = await child.start("minisgl.server.worker", settings(config, folder))
    facts = await until_ready(process)
    assert (facts.model_name, facts.context, facts.num_pages, facts.page_size) == ("tiny", 2048, 400, 16)
    assert facts.config["attention_backend"] == "reference,reference" and facts.eos_ids == [2]
    process.send_signal(signal.SIGINT)
    beats = child.reports(process)
    assert [(await anext(beats)).kind for _ in range(3)] == ["beat"] * 3, "also without work"
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 1


@pytest.mark.parametrize("loading", [True, False])
@in_loop
async def test_a_worker_does_not_outlive_an_owner_that_is_killed(config, folder, loading):
    script = f"""
import asyncio, sys
from minisgl.server import child
from minisgl.server.messages import EngineSettings
async def main():
    process = await child.start("minisgl.server.worker", {settings(config, folder)!r})
    print(process.pid, flush=True)
    async for report in child.reports(process):
        print(report.kind, flush=True)
asyncio.run(main())
"""
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", script, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(await owner.stdout.readline())
    while not loading and await owner.stdout.readline() != b"ready\n":
        pass
    owner.kill()
    await owner.wait()
    await asyncio.wait_for(gone(pid), 5)


def test_a_client_needs_no_torch_in_its_own_process():
    script = "import sys; sys.modules.update(torch=None, transformers=None); from minisgl import EngineClient"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
