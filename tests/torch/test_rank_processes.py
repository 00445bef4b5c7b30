"""Ranks as processes: whichever ends, all end within seconds, and say which it was; nothing stays behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from server_process import free_port, halt, is_alive, listening
from torch.distributed import TCPStore

from minisgl import LLM, EngineConfig, SamplingParams
from minisgl.parallel import crew, meeting
from minisgl.runtime.runner import ModelRunner

ROOT = Path(__file__).parents[2]
PROMPTS = [[3, 4, 5], [6] * 20, [7, 8]]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture
def model(tiny_model) -> str:
    return str(tiny_model("LlamaForCausalLM", num_key_value_heads=4))


def engine(model: str, report=None, **fields) -> LLM:
    fields = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "tp": 2, **fields}
    return LLM.from_config(EngineConfig(model=model, **fields), report)


def wait_until_gone(pids, within_s=10.0) -> None:
    until_s = time.monotonic() + within_s
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < until_s, f"still there: {left}"
        time.sleep(0.05)


def killed(rank: int, process: subprocess.Popen[bytes]) -> str:
    return rf"^rank {rank} \(pid {process.pid}\) ended with signal SIGKILL"


def test_engines_of_one_process_follow_each_other_and_leave_nothing(model, started):
    before = listening(os.getpid())
    for _ in range(2):
        with engine(model) as llm:
            assert len(llm.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))) == 3
            assert is_alive(started[-1].pid)
        assert started[-1].returncode == 0  # it was done, and not killed
        assert listening(os.getpid()) == before


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_rank_that_is_killed_at_its_start_ends_all(rank, model, monkeypatch):
    processes = []

    def start(task, words, own=crew._start):
        processes.append(own(task, words))
        if task.place.rank == rank:
            processes[-1].kill()
        return processes[-1]

    monkeypatch.setattr(crew, "_start", start)
    with pytest.raises(ChildProcessError, match=rf"^rank {rank} \(pid \d+\) ended with signal SIGKILL"):
        engine(model, tp=4)
    wait_until_gone([process.pid for process in processes])


def test_a_rank_that_is_killed_while_loading_ends_all(model, started):
    def report(what: str, done: float, total: float | None) -> None:
        if what.startswith("loading"):
            started[0].kill()

    with pytest.raises(ChildProcessError, match=r"^rank 1 \(pid \d+\) ended with signal SIGKILL"):
        engine(model, report)
    wait_until_gone([started[0].pid])


@pytest.mark.parametrize("rank", [1, 3])
def test_a_rank_that_is_killed_in_the_middle_of_a_step_ends_all_and_frees_the_requests(rank, model, started):
    with engine(model, tp=rank + 1) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        for _ in range(3):
            next(stream)
        started[rank - 1].kill()
        began_s = time.monotonic()
        with pytest.raises(ChildProcessError, match=killed(rank, started[rank - 1])):
            list(stream)
        assert time.monotonic() - began_s < 10
        with pytest.raises(ChildProcessError, match=killed(rank, started[rank - 1])):
            llm.generate(PROMPTS, LONG)
        assert llm.stats().running == 0
        wait_until_gone([process.pid for process in started])


def test_a_rank_that_hangs_ends_all_after_the_step_time_out(model, started):
    with engine(model, step_timeout=1.0) as llm:
        stream = llm.stream(PROMPTS[0], LONG)
        next(stream)
        halt(started[0].pid)
        with pytest.raises(ChildProcessError, match=rf"--step-timeout: rank 1 \(pid {started[0].pid}\) is behind"):
            list(stream)
        wait_until_gone([process.pid for process in started])


FAULTY = """#!{python}
import os, signal, sys, time
from minisgl.parallel import meeting
from minisgl.runtime import rank

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def hang(*_, **__):
    time.sleep(1000)

def explain(*_, **__):
    raise RuntimeError("an illegal memory access\\nCompile with another flag to know more.")

def abort(*_, **__):
    print("what(): too many open files", file=sys.stderr, flush=True)
    os.abort()

{moment} = {fault}
rank.main()
"""


@pytest.fixture
def faulty(tmp_path):
    """Makes a Python that is a rank, and is killed or hangs at a moment of its start: when it calls that function."""

    def program(moment: str, fault: str) -> str:
        file = tmp_path / "python"
        file.write_text(FAULTY.format(python=sys.executable, moment=moment, fault=fault))
        file.chmod(0o755)
        return str(file)

    return program


BEHIND = r"^the ranks have stood still for 4 s, see --step-timeout: rank 1 \(pid \d+\) is behind"
KILLED = r"^rank 1 \(pid \d+\) ended with signal SIGKILL"


@pytest.mark.parametrize(
    ("moment", "fault", "said"),
    [
        ("rank.join", "hang", BEHIND),
        ("rank.load_weights", "hang", BEHIND),
        ("rank.ModelRunner", "hang", r"^the ranks have stood still for 4 s"),
        ("rank.ModelRunner", "kill", KILLED),
        ("rank.join", "explain", r"ended with exit code 1: RuntimeError: an illegal memory access$"),
        ("rank.join", "abort", r"ended with signal SIGABRT: what\(\): too many open files$"),
    ],
    ids=[
        "hangs before it comes",
        "hangs while it loads",
        "hangs at the end",
        "is killed at the end",
        "fails",
        "aborts",
    ],
)
def test_a_rank_that_hangs_or_ends_while_it_starts_ends_all_and_says_why(
    moment, fault, said, model, started, faulty, monkeypatch
):
    if fault == "hang":
        monkeypatch.setattr(meeting, "START_S", 4.0)
    monkeypatch.setattr(sys, "executable", faulty(moment, fault))
    with pytest.raises(ChildProcessError, match=said):
        engine(model, step_timeout=1.0)
    assert [process.returncode for process in started] == [
        {"explain": 1, "abort": -signal.SIGABRT}.get(fault, -signal.SIGKILL)
    ]


def test_ranks_that_all_take_their_time_are_not_said_to_hang(model, monkeypatch):
    def slow(self, batch):
        time.sleep(3)

    monkeypatch.setattr(ModelRunner, "launch", slow)
    said = r"stood still for 1 s, .*: none is behind, so a step may just take longer$"
    with engine(model, step_timeout=1.0) as llm, pytest.raises(ChildProcessError, match=said):
        llm.generate(PROMPTS, LONG)


def test_ctrl_c_while_ranks_are_started_leaves_none(model, monkeypatch):
    processes = []

    def start(*arguments, own=crew._start):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        processes.append(own(*arguments))
        return processes[-1]

    monkeypatch.setattr(crew, "_start", start)
    with pytest.raises(KeyboardInterrupt):
        engine(model, tp=2)
    wait_until_gone([process.pid for process in processes])
    assert len(processes) == 1


COPIED = """
import sys
sys.path.insert(0, sys.argv[1])
from minisgl import LLM
with LLM(sys.argv[2], dtype="float32", device="cpu", max_model_len=512, tp=2) as llm:
    print(sys.modules["minisgl"].__file__)
"""


def test_ranks_run_the_very_code_of_the_process_that_starts_them(model, tmp_path):
    """Not what is installed, where a script has put another before it."""
    copy = tmp_path / "minisgl"
    shutil.copytree(ROOT / "minisgl", copy)
    with (copy / "runtime/rank.py").open("a") as file:
        file.write(f"    open({str(tmp_path / 'said')!r}, 'w').write(str(sys.modules['minisgl'].__file__))\n")
    (copy / "runtime/rank.py").write_text((copy / "runtime/rank.py").read_text().replace("    leave(0)", "    return"))
    command = [sys.executable, "-c", COPIED, str(tmp_path), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == str(copy / "__init__.py"), done.stderr
    assert (tmp_path / "said").read_text() == str(copy / "__init__.py")


START = """
import sys
from minisgl import LLM
from minisgl.parallel import meeting
_, model, sys.executable, meeting.START_S = *sys.argv[:3], float(sys.argv[3])
LLM(model, dtype="float32", device="cpu", max_model_len=512, tp=2, step_timeout=1.0)
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [("hang", "stood still for 4 s"), ("kill", "ended with signal SIGKILL")],
    ids=["hangs", "is killed"],
)
def test_a_rank_that_hangs_or_is_killed_while_the_group_is_formed_ends_all(fault, said, model, faulty):
    """Rank 0's process too: it may be inside a call that waits for the other."""
    limit_s = "4" if fault == "hang" else "100"
    command = [sys.executable, "-c", START, model, faulty("meeting.make_ranks", fault), limit_s]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert said in done.stderr.splitlines()[-1], done.stderr


def test_a_rank_that_cannot_load_says_why(model, monkeypatch):
    def start(task, words, own=crew._start):
        task.folder += "-that-is-not-there"
        return own(task, words)

    monkeypatch.setattr(crew, "_start", start)
    with pytest.raises(ChildProcessError, match=r"^rank 1 \(pid \d+\) ended with exit code 1: .*-that-is-not-there"):
        engine(model)


KILLED_LEADER = """
import os, signal
from minisgl import LLM
from minisgl.parallel import crew

def start(task, words, own=crew._start):
    process = own(task, words)
    print(process.pid, flush=True)
    return process

crew._start = start
with LLM({model!r}, dtype="float32", device="cpu", max_model_len=512, tp=2) as llm:
    for _ in llm.stream([3, 4, 5]):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_the_process_that_has_started_them(model):
    script = KILLED_LEADER.replace("{model!r}", repr(model))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 1
    wait_until_gone(pids)


ASK = """
import sys
from minisgl import LLM, SamplingParams
fields = dict(field.split("=") for field in sys.argv[2:])
fields = {name: int(value) if value.isdigit() else value for name, value in fields.items()}
with LLM(sys.argv[1], dtype="float32", device="cpu", max_model_len=512, **fields) as llm:
    outs = llm.generate([[3, 4, 5], [6] * 20, [7, 8]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    print([out.outputs[0].token_ids for out in outs])
"""


def expected(model: str) -> str:
    with engine(model, tp=1) as llm:
        outs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        return str([out.outputs[0].token_ids for out in outs])


def test_torchrun_starts_ranks_too(model, tmp_path):
    (tmp_path / "ask.py").write_text(ASK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, str(tmp_path / "ask.py"), model, "tp=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected(model)  # of rank 0 alone


TWICE = """
import sys
from minisgl import LLM
for _ in range(2):
    LLM(sys.argv[1], dtype="float32", device="cpu", max_model_len=512, tp=2).close()
    print("closed", flush=True)
"""


def test_a_second_engine_under_torchrun_is_refused(model, tmp_path):
    """The other ranks have ended with the first."""
    (tmp_path / "twice.py").write_text(TWICE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, str(tmp_path / "twice.py"), model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "closed\n"), done.stderr
    assert "have ended with their first engine: a script has one there" in done.stderr


def start_host(model: str, port: int, rank: int, *options: str) -> subprocess.Popen[str]:
    """One of two hosts that ask for the same engine."""
    fields = ["tp=2", "nnodes=2", f"node_rank={rank}", f"dist_init_addr=127.0.0.1:{port}", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", ASK, model, *fields], **pipes)


def test_two_hosts_are_one_engine(tiny_model):
    """Each starts two ranks, and the first of the second host asks for the same engine as the first of all."""
    model = str(tiny_model("Qwen3ForCausalLM"))
    port = free_port()
    second, first = (start_host(model, port, rank, "tp=4") for rank in (1, 0))
    (out, errors), (nothing, other_errors) = (host.communicate(timeout=100) for host in (first, second))
    assert (first.returncode, second.returncode) == (0, 0), (errors, other_errors)
    assert (out.strip(), nothing) == (expected(model), "")


def test_a_host_with_other_options_or_another_model_is_refused_and_may_come_again(model, tiny_model):
    """They would wait for each other for ever, or compute what is neither's."""
    other = str(tiny_model("LlamaForCausalLM", num_key_value_heads=4, intermediate_size=48))
    port = free_port()
    first = start_host(model, port, 0)
    _, errors = start_host(other, port, 1, "page_size=32").communicate(timeout=60)
    differ = "page_size is 32, there 16; the model's intermediate_size is 48, there 96"
    assert errors.splitlines()[-1].endswith(f"not the options or the model of the first host: {differ}"), errors
    second = start_host(model, port, 1)
    out, errors = first.communicate(timeout=60)
    assert (first.returncode, second.wait(10)) == (0, 0), errors
    assert out.strip() == expected(model)
    for pipe in (second.stdout, second.stderr):
        assert pipe is not None
        pipe.close()


WAIT = """
import os, signal, sys, threading
from minisgl import LLM
from minisgl.runtime import rank

def join(*arguments, own=rank.join):
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    return own(*arguments)

rank.join = join
LLM(sys.argv[1], device="cpu", tp=2, nnodes=2, node_rank=1, dist_init_addr=f"127.0.0.1:{sys.argv[2]}")
"""


def wait_in_vain(model: str, port: int) -> None:
    command = [sys.executable, "-c", WAIT, model, str(port)]
    done = subprocess.run(command, stderr=subprocess.PIPE, timeout=30, check=False)
    assert done.returncode == -signal.SIGINT, done.stderr


def test_the_wait_for_the_first_host_ends_with_ctrl_c(model):
    wait_in_vain(model, 1)


def test_the_wait_for_what_is_no_host_and_says_nothing_ends_with_ctrl_c(model):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        wait_in_vain(model, silent.getsockname()[1])


def test_the_wait_for_a_first_host_that_does_not_get_on_ends_with_ctrl_c(model):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wait_in_vain(model, store.port)


def test_an_address_that_is_not_of_the_first_host_is_said(model):
    with pytest.raises(ValueError, match=r"^cannot listen at 192\.0\.2\.1:2345, no free port of this host: Cannot"):
        engine(model, nnodes=2, dist_init_addr="192.0.2.1:2345")


def test_a_rank_says_that_rank_0_has_gone_and_not_what_its_sums_made_of_that(monkeypatch):
    monkeypatch.setattr(crew, "_TELL_S", 2.0)
    line, other_side = socket.socketpair()
    ranks = crew.Crew([crew.Other(0, line=line)], [], on_device=False)

    def work() -> None:
        with ranks.at_work(together=True):
            other_side.close()
            time.sleep(0.5)
            raise RuntimeError("connection reset by peer")

    with pytest.raises(ChildProcessError, match=r"^rank 0 has closed its connection"):
        work()
    ranks.close()


def test_ranks_of_one_host_listen_on_its_loopback_alone(model, started):
    with engine(model):
        addresses = [{address.split(":")[0] for address in listening(pid)} for pid in (os.getpid(), started[0].pid)]
        assert addresses == [{"0100007F"}] * 2


FORKED = """
import os, sys
from minisgl import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", device="cpu", max_model_len=512, tp=2) as llm:
    if (child := os.fork()) == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    print(len(llm.generate([[3, 4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids))
"""


def test_a_fork_of_the_process_that_ends_does_not_end_its_ranks(model):
    command = [sys.executable, "-W", "ignore", "-c", FORKED, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr


HANGS = """#!{python}
import runpy, sys, time, torch
torch.ones = lambda *_, **__: time.sleep(60)
sys.argv = sys.argv[3:]  # without -P -m
runpy.run_module(sys.argv[0], run_name="__main__")
"""


def test_what_measures_a_device_ends_with_the_process_that_wants_to_know(tmp_path):
    file = tmp_path / "python"
    file.write_text(HANGS.format(python=sys.executable))
    file.chmod(0o755)
    script = (
        "import sys\nfrom minisgl.bench.ceilings import in_child\nsys.executable = sys.argv[1]\nin_child('cpu', '-')"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(file)]) as owner:
        until_s = time.monotonic() + 30
        while not (found := children(owner.pid, "minisgl.profiling.ceilings")):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        owner.kill()
    wait_until_gone(found)


def test_torchrun_starts_no_command_whose_engine_is_a_process_of_its_own(model):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*torchrun, "-m", "minisgl", "serve", model, "--tp", "2", "--device", "cpu", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Error: torchrun cannot start this, whose engine is a process of its own: use --tp" in done.stderr


def children(pid: int, module: str) -> list[int]:
    """The children of a process that run a module."""
    pids = [int(pid) for file in Path(f"/proc/{pid}/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in pids if module in Path(f"/proc/{pid}/cmdline").read_text()]


def test_a_server_that_has_nothing_to_do_ends_with_a_rank_that_is_killed(model):
    command = [sys.executable, "-m", "minisgl", "serve", model, "--tp", "2", "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = next((line for line in server.stderr if "ready at" in line), "")
        (engine_pid,) = children(server.pid, "minisgl.server.worker")
        (rank_pid,) = children(engine_pid, "minisgl.runtime.rank")
        os.kill(rank_pid, signal.SIGKILL)
        said += server.stderr.read()
        assert server.wait(10) == 1, said
    assert said.splitlines()[-1].endswith(f"rank 1 (pid {rank_pid}) ended with signal SIGKILL")
    wait_until_gone([engine_pid])
