"""What a user can set, and what is refused."""

import dataclasses
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from annotated_doc import Doc

from minisgl.config import EngineConfig, SamplingParams
from minisgl.server.config import ServerConfig

BOTH = pytest.mark.parametrize("group", [EngineConfig, SamplingParams])


def refusal(group: type, **values: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the caller looks at the message
        group(**values)
    return str(caught.value)


def test_the_names_that_scripts_rely_on_are_there():
    engine = (
        "model revision dtype load_format max_model_len page_size num_pages gpu_memory_utilization "
        "max_running_requests chunked_prefill_size mixed_batch schedule_policy cache overlap cuda_graph "
        "cuda_graph_max_bs attention_backend tp device"
    )
    sampling = "max_tokens temperature top_k top_p seed stop stop_token_ids ignore_eos"
    assert set(engine.split()) <= {f.name for f in fields(EngineConfig)}
    assert set(sampling.split()) <= {f.name for f in fields(SamplingParams)}


@BOTH
def test_every_field_says_in_one_sentence_what_it_does(group: Any):
    for field in fields(group):
        (doc,) = (note.documentation for note in get_args(field.type) if isinstance(note, Doc))
        assert doc.endswith(".") and "\n" not in doc


@BOTH
def test_nothing_can_be_changed_once_built(group: Any):
    for field in fields(group):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group(), field.name, None)


def test_sampling_that_nobody_set_is_unset():
    assert all(value is None for value in dataclasses.asdict(SamplingParams()).values())


@BOTH
def test_every_field_refuses_what_is_not_of_its_type_by_name(group: Any):
    for field in fields(group):
        for wrong in (object(), {"x": "y"}, [None], b"x", 1j):
            assert refusal(group, **{field.name: wrong}).startswith(f"{field.name} must be ")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be from 1 to 2147483647, got 0"),
        ({"tp": True}, "tp must be a whole number, got True"),
        ({"tp": 2.0}, "tp must be a whole number, got 2.0"),
        ({"dtype": "int8"}, "dtype must be auto, float16, bfloat16 or float32, got 'int8'"),
        ({"dtype": None}, "dtype must be auto, float16, bfloat16 or float32, got None"),
        ({"model": "  "}, "model must be a folder, a .gguf file, a repo id or an alias, got an empty text"),
        ({"model": 5}, "model must be a text, got 5"),
        ({"revision": 5}, "revision must be a text or unset, got 5"),
        ({"max_model_len": 1}, "max_model_len must be from 2 to 2147483647, got 1"),
        ({"max_model_len": "32k"}, "max_model_len must be a whole number or unset, got '32k'"),
        ({"page_size": 0}, "page_size must be from 1 to 2147483647, got 0"),
        ({"num_pages": 0}, "num_pages must be from 1 to 2147483647, got 0"),
        ({"max_running_requests": 0}, "max_running_requests must be from 1 to 65536, got 0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be from 1 to 2147483647, got 0"),
        ({"cuda_graph_max_bs": -1}, "cuda_graph_max_bs must be at least 0, got -1"),
        ({"cuda_graph": 1}, "cuda_graph must be true, false or unset, got 1"),
        ({"overlap": "no"}, "overlap must be true, false or unset, got 'no'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0 and at most 1, got 0"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be above 0 and at most 1, got 1.01"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be a finite number, got nan"),
    ],
)
def test_a_wrong_engine_option_is_refused_with_what_is_allowed(values: dict[str, Any], message: str):
    assert refusal(EngineConfig, **values) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"temperature": -0.1}, "temperature must be from 0 to 100, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be a finite number or unset, got inf"),
        ({"temperature": 10**40}, f"temperature must be from 0 to 100, got {10**40}"),
        ({"temperature": "0" * 1000}, f"temperature must be a finite number or unset, got '{'0' * 199}"),
        ({"temperature": "0"}, "temperature must be a finite number or unset, got '0'"),
        ({"top_k": -2}, "top_k must be from -1 to 2147483647, got -2"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"seed": 2**63}, f"seed must be from {-(2**63)} to {2**63 - 1}, got {2**63}"),
        ({"stop": ""}, "stop must not be an empty text: every answer has it"),
        ({"stop": ["a", ""]}, "stop must not be an empty text: every answer has it"),
        ({"stop": ["a", 1]}, "stop must be a text, a list of texts or unset, got ['a', 1]"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list of whole numbers or unset, got '12'"),
        ({"stop_token_ids": [True]}, "stop_token_ids must be a list of whole numbers or unset, got [True]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be from 0 to 2147483647, got -1"),
        ({"ignore_eos": 1}, "ignore_eos must be true, false or unset, got 1"),
        ({"priority": 1001}, "priority must be from -1000 to 1000, got 1001"),
    ],
)
def test_a_wrong_sampling_option_is_refused_with_what_is_allowed(values: dict[str, Any], message: str):
    assert refusal(SamplingParams, **values) == message


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 100},
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": 1},
        {"top_p": 1},
        {"max_tokens": 1},
        {"seed": -(2**63)},
        {"stop": "x"},
        {"stop": ()},
        {"stop_token_ids": ()},
    ],
)
def test_the_values_at_the_edge_are_allowed(values: dict[str, Any]):
    assert dataclasses.asdict(SamplingParams(**values)).items() >= values.items()


def test_texts_are_a_tuple_however_they_are_given():
    given = [SamplingParams(stop=stop).texts("stop") for stop in (None, "a", ["a", "b"], ("c",))]
    assert given == [(), ("a",), ("a", "b"), ("c",)]


def test_defaults_fill_only_what_is_unset():
    sampling = SamplingParams(temperature=0.0, top_p=0.5)
    filled = sampling.with_defaults({"temperature": 0.2, "top_k": 40, "ignore_eos": False})
    assert filled == SamplingParams(temperature=0.0, top_p=0.5, top_k=40, ignore_eos=False)


def test_defaults_of_an_unknown_name_are_refused():
    with pytest.raises(ValueError, match="unknown sampling defaults: heat"):
        SamplingParams().with_defaults({"heat": 1})


def test_the_public_names_load_on_first_use():
    script = (
        "import sys, minisgl\n"
        "from minisgl import EngineConfig, SamplingParams\n"
        "assert set(minisgl.__all__) <= set(dir(minisgl))\n"
        "assert 'torch' not in sys.modules and 'minisgl.llm' not in sys.modules\n"
        "try: minisgl.Nothing\n"
        "except AttributeError as error: print(error)\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout == "module 'minisgl' has no attribute 'Nothing'\n"


def test_what_a_caller_does_to_its_lists_later_changes_nothing():
    given = {"stop": ["a"], "bad_words": ["b"], "stop_token_ids": [1], "logit_bias": {5: 1.0}}
    params = SamplingParams(**given)
    for value in given.values():
        value.clear()
    assert (params.stop, params.bad_words, params.stop_token_ids, params.logit_bias) == (("a",), ("b",), (1,), {5: 1.0})


def test_a_servers_lists_may_be_a_single_text():
    config = ServerConfig(api_key="secret", served_model_name=["a", "b"])
    assert (config.api_key, config.served_model_name, config.allowed_origins) == (("secret",), ("a", "b"), None)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", 70_000, "port must be from 0 to 65535, got 70000"),
        ("api_key", ["", "x"], "api_key must not be an empty text"),
        ("watchdog_timeout", 1, "watchdog_timeout must be from 5 to 86400, got 1"),
        ("request_timeout", 0, "request_timeout must be above 0 and at most 86400, got 0"),
    ],
)
def test_a_servers_value_that_cannot_be_is_refused(field: str, value: Any, message: str):
    assert refusal(ServerConfig, **{field: value}) == message
