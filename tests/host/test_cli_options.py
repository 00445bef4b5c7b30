"""Options derived from dataclasses: flags, variables, TOML keys, and what is refused."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from annotated_doc import Doc

from cli.options import command
from cli.run import PromptConfig
from cli.terminal import LogConfig
from minisgl.config import EngineConfig, Flag, SamplingParams, check_types
from minisgl.server.config import ServerConfig


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MINISGL_")]:
        monkeypatch.delenv(name)


@dataclass(frozen=True)
class Parsed:
    """What the command was called with."""

    words: list[str]
    config: EngineConfig
    sampling: SamplingParams
    form: PromptConfig
    server: ServerConfig
    logs: LogConfig

    def value_of(self, name: str) -> Any:
        groups = (self.config, self.sampling, self.form, self.server, self.logs)
        value = next(getattr(group, name) for group in groups if hasattr(group, name))
        return list(value) if isinstance(value, tuple) else value


def parse(*arguments: str) -> Parsed:
    called = []
    app = typer.Typer()

    def run(
        words: list[str],
        config: EngineConfig,
        sampling: SamplingParams,
        form: PromptConfig,
        server: ServerConfig,
        logs: LogConfig,
    ) -> None:
        """Answer."""
        called.append(Parsed(words, config, sampling, form, server, logs))

    command(app, run)
    app([*arguments, "word"], standalone_mode=False)
    return called[0]


def refusal(*arguments: str) -> str:
    """The message of the usage error that the arguments end in."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  its class has moved between versions of Typer
        parse(*arguments)
    assert getattr(caught.value, "exit_code", None) == 2
    return caught.value.format_message()  # type: ignore[attr-defined]


VALUES: dict[str, Any] = {
    "model": "some/repo",
    "revision": "v1",
    "dtype": "float16",
    "load_format": "dummy",
    "device": "cpu",
    "max_model_len": 1024,
    "page_size": 32,
    "num_pages": 99,
    "gpu_memory_utilization": 0.5,
    "max_running_requests": 7,
    "chunked_prefill_size": 64,
    "mixed_batch": False,
    "schedule_policy": "lpm",
    "cache": "none",
    "overlap": False,
    "cuda_graph": False,
    "cuda_graph_max_bs": 0,
    "cuda_graph_bs": [1, 8],
    "attention_backend": "reference",
    "tp": 2,
    "nnodes": 2,
    "node_rank": 1,
    "dist_init_addr": "host:29500",
    "step_timeout": 20.5,
    "n": 3,
    "max_tokens": 5,
    "min_tokens": 2,
    "temperature": 0.25,
    "top_k": -1,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": -3,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {15043: -100.0, 5: 1},
    "bad_words": ["a b", "c"],
    "stop": ["two words", "["],
    "stop_token_ids": [1, 2],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": 0,
    "prompt_logprobs": 3,
    "priority": -5,
    "raw": True,
    "system": "Be brief.",
    "lines": True,
    "json": True,
    "input": "in.jsonl",
    "output": "out.jsonl",
    "host": "0.0.0.0",
    "port": 0,
    "frontends": 4,
    "api_key": ["one", "two"],
    "served_model_name": ["a", "b"],
    "chat_template": "chat.jinja",
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "max_queued_requests": 10,
    "request_timeout": 2.5,
    "drain_timeout": 0.0,
    "watchdog_timeout": 5.5,
    "max_body_mb": 0.5,
    "allowed_origins": ["*"],
    "log_requests": True,
    "log_interval": 0.0,
    "log_level": "debug",
}
"""For every option a value that is not its default."""

EACH = pytest.mark.parametrize(("name", "value"), VALUES.items(), ids=VALUES.keys())


def as_flags(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, dict):
        return [f"--{flag}", json.dumps(value)]
    return [part for each in (value if isinstance(value, list) else [value]) for part in (f"--{flag}", str(each))]


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {as_toml(each)}' for key, each in value.items()) + "}"
    return json.dumps(value)


def test_the_table_of_values_has_every_option_once():
    groups = (EngineConfig, SamplingParams, PromptConfig, ServerConfig, LogConfig)
    defaults = {f.name: f.default for group in groups for f in fields(group)}
    assert VALUES.keys() == defaults.keys()
    assert not [name for name in VALUES if VALUES[name] == defaults[name]]


@EACH
def test_a_flag_sets_its_field(name: str, value: Any):
    assert parse(*as_flags(name, value)).value_of(name) == value


@EACH
def test_a_variable_sets_its_field(name: str, value: Any, monkeypatch: pytest.MonkeyPatch):
    # $MINISGL_CACHE is the folder that models are kept in
    variable = "MINISGL_KV_CACHE" if name == "cache" else f"MINISGL_{name.upper()}"
    monkeypatch.setenv(variable, json.dumps(value) if isinstance(value, list | dict) else str(value))
    assert parse().value_of(name) == value


@EACH
def test_a_toml_key_sets_its_field(name: str, value: Any, tmp_path: Path):
    file = tmp_path / "some.toml"
    file.write_text(f"{name} = {as_toml(value)}")
    assert parse("--config", str(file)).value_of(name) == value


def test_what_nobody_sets_keeps_the_default_of_its_dataclass():
    parsed = parse()
    assert parsed == Parsed(["word"], EngineConfig(), SamplingParams(), PromptConfig(), ServerConfig(), LogConfig())
    assert parsed.config.cuda_graph is None
    assert all(value is None for value in dataclasses.asdict(parsed.sampling).values())


def test_a_flag_wins_over_the_variable_the_variable_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "some.toml"
    file.write_text("page_size = 1\nnum_pages = 1\nmax_model_len = 11")
    monkeypatch.setenv("MINISGL_PAGE_SIZE", "2")
    monkeypatch.setenv("MINISGL_NUM_PAGES", "2")
    config = parse("--config", str(file), "--page-size", "3").config
    assert (config.page_size, config.num_pages, config.max_model_len) == (3, 2, 11)


def test_a_flag_of_either_spelling_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_KV_CACHE", "radix")
    monkeypatch.setenv("MINISGL_OVERLAP", "true")
    monkeypatch.setenv("MINISGL_TP", "4")
    config = parse("--disable-radix-cache", "--disable-overlap-schedule", "--tp-size", "2").config
    assert (config.cache, config.overlap, config.tp) == ("none", False, 2)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--context-length 512", "max_model_len", 512),
        ("--mem-fraction-static 0.5", "gpu_memory_utilization", 0.5),
        ("--tensor-parallel-size 2", "tp", 2),
        ("--tp-size 2", "tp", 2),
        ("--max-num-seqs 3", "max_running_requests", 3),
        ("--cuda-graph-bs 8", "cuda_graph_bs", [8]),
        ("--disable-radix-cache", "cache", "none"),
        ("--disable-cuda-graph", "cuda_graph", False),
        ("--enforce-eager", "cuda_graph", False),
        ("--disable-overlap-schedule", "overlap", False),
        ("--cuda-graph", "cuda_graph", True),
        ("--no-cuda-graph", "cuda_graph", False),
        ("--max-new-tokens 4", "max_tokens", 4),
        ("-n 4", "n", 4),
        ("--max-tokens=4", "max_tokens", 4),
    ],
)
def test_a_known_spelling_of_other_engines_is_an_alias(flags: str, name: str, value: Any):
    assert parse(*flags.split()).value_of(name) == value


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--cache radix --disable-radix-cache", ["radix (--cache)", "none (--disable-radix-cache)"]),
        ("--cuda-graph --enforce-eager", ["on (--cuda-graph)", "off (--enforce-eager)"]),
        ("--overlap --no-overlap", ["on (--overlap)", "off (--no-overlap)"]),
        ("--tp 1 --tp-size 2", ["1 (--tp)", "2 (--tp-size)"]),
        ("--seed 1 --seed 2", ["1 (--seed)", "2 (--seed)"]),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: str, parts: list[str]):
    message = refusal(*flags.split())
    assert not [part for part in parts if part not in message], message


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--cache none --disable-radix-cache", "cache", "none"),
        ("--enforce-eager --disable-cuda-graph --no-cuda-graph", "cuda_graph", False),
        ("--tp 2 --tp-size 2 --tensor-parallel-size 2 --tp 2", "tp", 2),
    ],
)
def test_saying_the_same_twice_is_fine(flags: str, name: str, value: Any):
    assert parse(*flags.split()).value_of(name) == value


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--max-model-len 32k", ["--max-model-len", "whole number", "'32k'"]),
        ("--context-length 1.5", ["--context-length", "whole number", "'1.5'"]),
        ("--tp 0", ["--tp", "from 1 to", "0"]),
        ("-n 0", ["-n", "from 1 to", "0"]),
        ("-n 1 --n 2", ["--n", "1 (-n)", "2 (--n)"]),
        ('--logit-bias {"1":101}', ["--logit-bias", "from -100 to 100", "101"]),
        ('--logit-bias {"one":1}', ["--logit-bias", "map from token ids to numbers", "'one'"]),
        ("--logit-bias [1]", ["--logit-bias", "map from token ids to numbers", "[1]"]),
        ("--logit-bias 15043", ["--logit-bias", "map from token ids to numbers", "15043"]),
        ("--logit-bias {", ["--logit-bias", "map from token ids to numbers", "'{'"]),
        ("--dtype float8", ["--dtype", "auto, float16, bfloat16 or float32", "'float8'"]),
        ("--cache=lru", ["--cache", "radix or none", "'lru'"]),
        ("--gpu-memory-utilization 90", ["--gpu-memory-utilization", "at most 1", "90"]),
        ("--temperature warm", ["--temperature", "finite number", "'warm'"]),
        ("--temperature nan", ["--temperature", "finite number", "nan"]),
        ("--max-tokens 0", ["--max-tokens", "at least 1", "0"]),
        ("--max-tokens -1", ["--max-tokens", "at least 1", "-1"]),
        ("--stop-token-ids 1 --stop-token-ids x", ["--stop-token-ids", "list of whole numbers", "'x'"]),
        ("--log-level loud", ["--log-level", "debug, info, warning, error", "'loud'"]),
        ("--raw --system hello", ["--system", "raw"]),
    ],
)
def test_a_wrong_value_is_refused_with_the_flag_and_what_is_allowed(flags: str, parts: list[str]):
    message = refusal(*flags.split())
    assert not [part for part in parts if part not in message], message


def test_an_unknown_flag_is_refused_with_the_nearest():
    assert "--temperature" in refusal("--temprature", "1")
    assert "--disable-radix-cache" in refusal("--disable-radix-cach")


def test_a_variable_that_is_empty_counts_as_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_TP", "")
    assert parse().config.tp == 1


@pytest.mark.parametrize("word", ["1", "true", "on", "Yes"])
def test_a_variable_says_yes_in_several_words(word: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_CUDA_GRAPH", word)
    assert parse().config.cuda_graph is True


@pytest.mark.parametrize("word", ["0", "false", "OFF", "no"])
def test_a_variable_says_no_in_several_words(word: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_CUDA_GRAPH", word)
    assert parse().config.cuda_graph is False


def test_a_list_variable_may_be_a_single_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINISGL_STOP", "two words")
    monkeypatch.setenv("MINISGL_STOP_TOKEN_IDS", "7")
    parsed = parse()
    assert (parsed.value_of("stop"), parsed.value_of("stop_token_ids")) == (["two words"], [7])


@pytest.mark.parametrize(
    ("variable", "text", "parts"),
    [
        ("MINISGL_TP", "two", ["MINISGL_TP", "whole number", "'two'"]),
        ("MINISGL_MIXED_BATCH", "maybe", ["MINISGL_MIXED_BATCH", "true or false", "'maybe'"]),
        ("MINISGL_STOP", "[END]", ["MINISGL_STOP", "JSON", '["[END]"]']),
        ("MINISGL_STOP_TOKEN_IDS", '["a"]', ["MINISGL_STOP_TOKEN_IDS", "whole numbers", "['a']"]),
        ("MINISGL_KV_CACHE", "lru", ["MINISGL_KV_CACHE", "radix or none", "'lru'"]),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name(
    variable: str, text: str, parts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(variable, text)
    message = refusal()
    assert not [part for part in parts if part not in message], message


def test_the_tables_of_a_file_only_group_its_keys(tmp_path: Path):
    file = tmp_path / "some.toml"
    file.write_text("seed = 1\n[engine]\ntp = 2\n[engine.cache]\npage_size = 8\n[sampling]\ntop_k = 3")
    parsed = parse("--config", str(file))
    assert (parsed.sampling.seed, parsed.config.tp, parsed.config.page_size, parsed.sampling.top_k) == (1, 2, 8, 3)


def test_a_map_is_a_table_of_a_file_under_its_own_name(tmp_path: Path):
    file = tmp_path / "some.toml"
    file.write_text('[sampling]\ntop_k = 3\n[sampling.logit_bias]\n5 = 1.5\n"15043" = -100\n[engine]\ntp = 2')
    parsed = parse("--config", str(file))
    assert parsed.sampling == SamplingParams(top_k=3, logit_bias={5: 1.5, 15043: -100})
    assert parsed.config.tp == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('tp = "2"', ["tp in", "some.toml", "whole number", "'2'"]),
        ("tp = true", ["tp in", "whole number", "True"]),
        ("tp = 2.0", ["tp in", "whole number", "2.0"]),
        ("mixed_batch = 1", ["mixed_batch in", "true or false", "1"]),
        ("logit_bias = 1", ["logit_bias in", "map from token ids to numbers", "1"]),
        ("[logit_bias]\nx = 1", ["logit_bias in", "map from token ids to numbers", "'x'"]),
        ("model = 5", ["model in", "a text", "5"]),
        ("stop = [1]", ["stop in", "list of texts", "[1]"]),
        ('stop_token_ids = "1"', ["stop_token_ids in", "list of whole numbers", "'1'"]),
        ("seed = 2026-01-01", ["seed in", "whole number", "2026"]),
        ('system = "x"\nraw = true', ["system in", "raw"]),
        ("temprature = 1", ["some.toml", "temprature", "temperature"]),
        ("max-model-len = 9", ["some.toml", "max-model-len", "max_model_len"]),
        ("zzz = 1", ["some.toml", "zzz"]),
        ('config = "other.toml"', ["some.toml", "config"]),
        ("[a]\ntp = 1\n[b]\ntp = 1", ["some.toml", "tp", "twice"]),
        ("tp = x", ["some.toml", "not TOML", "line 1"]),
        ("tp = 1 # \udcff", ["some.toml", "not TOML"]),
    ],
)
def test_a_wrong_file_is_refused_with_key_value_and_what_is_allowed(text: str, parts: list[str], tmp_path: Path):
    file = tmp_path / "some.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    message = refusal("--config", str(file))
    assert not [part for part in parts if part not in message], message


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path):
    assert "No such file" in refusal("--config", str(tmp_path / "none.toml"))
    assert "Is a directory" in refusal("--config", str(tmp_path))


def test_two_files_are_one_too_many(tmp_path: Path):
    (tmp_path / "one.toml").touch()
    config = ("--config", str(tmp_path / "one.toml"))
    assert "one file only, not 2" in refusal(*config, *config)


def test_the_help_tells_of_every_option_all_that_its_field_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "250")
    with pytest.raises(IndexError):  # --help ends before the command is called
        parse("--help")
    rows = capsys.readouterr().out.splitlines()
    for name in VALUES:
        (row,) = (row for row in rows if f" --{name.replace('_', '-')} " in row and "env: " in row)
        assert ("MINISGL_KV_CACHE" if name == "cache" else f"MINISGL_{name.upper()}") in row
    (dtype,) = (row for row in rows if " --dtype " in row)
    assert "Type of weights" in dtype
    assert "auto, float16, bfloat16, float32; default: auto;" in dtype
    (mixed,) = (row for row in rows if " --mixed-batch " in row)
    assert "default: on; off: --no-mixed-batch;" in mixed
    (overlap,) = (row for row in rows if " --overlap " in row)
    assert "off: --no-overlap, --disable-overlap-schedule;" in overlap
    (bias,) = (row for row in rows if " --logit-bias " in row)
    assert " JSON " in bias
    (n,) = (row for row in rows if " --n " in row)
    assert "also -n;" in n
    (tp,) = (row for row in rows if " --tp " in row)
    assert "also --tensor-parallel-size, --tp-size;" in tp
    (cache,) = (row for row in rows if " --cache " in row)
    assert "none: --disable-radix-cache;" in cache
    (config,) = (row for row in rows if " --config " in row)
    assert "A flag wins over its environment variable, the variable over the file" in config
    for panel in ("Engine", "Sampling (unset: the model's own default)", "Prompts and answers", "Logs"):
        assert any(row.startswith(f"╭─ {panel} ─") for row in rows)


@dataclass(frozen=True, kw_only=True)
class Fruit:
    """Fruit"""

    sort: Annotated[Literal["apple", "pear"], Doc("Which."), Flag(shorthands={"--pear": "pear"}, env="FRUIT")] = "apple"
    ripe: Annotated[bool, Doc("Ripe."), Flag(aliases=("--mellow",))] = False
    grams: Annotated[Sequence[float], Doc("Weights.")] = ()

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Stall"""

    ripe: Annotated[bool, Doc("Another of that name.")] = False


def test_a_dataclass_of_ones_own_becomes_options_in_the_same_way(monkeypatch: pytest.MonkeyPatch):
    app, called = typer.Typer(), []

    def buy(fruit: Fruit, count: int = 1) -> None:
        called.append((fruit, count))

    command(app, buy)
    app(["--pear", "--mellow", "--grams", "1.5", "--grams", "2", "--count", "3"], standalone_mode=False)
    monkeypatch.setenv("FRUIT", "pear")
    app([], standalone_mode=False)
    assert called == [(Fruit(sort="pear", ripe=True, grams=[1.5, 2.0]), 3), (Fruit(sort="pear"), 1)]


def test_two_groups_of_one_command_may_not_share_a_name():
    def buy(fruit: Fruit, stall: Stall) -> None: ...

    with pytest.raises(ValueError, match="ripe"):
        command(typer.Typer(), buy)
