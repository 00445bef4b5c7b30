"""Which attention kernels run where; the packages are made believe, none is imported."""

import logging
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from minisgl.attention import choose, flash, flashinfer, triton
from minisgl.attention.base import Shape
from minisgl.build import resolve_kernels
from minisgl.config import EngineConfig
from minisgl.doctor import checks, machine
from minisgl.doctor.machine import Gpu, Nvidia, Torch
from minisgl.source.model_config import read_model_config

QWEN3 = Path(__file__).parents[2] / "bench_configs" / "models" / "qwen3-0.6b"


@pytest.fixture
def installed(monkeypatch):
    """`installed(names)`: only these packages are there, and Triton."""
    monkeypatch.setattr(triton, "triton", object())

    def distribution(name: str, names: tuple[str, ...]) -> str:
        if name not in names:
            raise PackageNotFoundError(name)
        return name

    def set_installed(*names: str) -> None:
        monkeypatch.setattr(flashinfer, "find_spec", lambda name: name if name in names else None)
        monkeypatch.setattr(flash, "distribution", lambda name: distribution(name, names))

    return set_installed


def shape(capability=(9, 0), page_size=64, group=2, head_size=128, dtype=torch.bfloat16) -> Shape:
    return Shape(page_size, 4 * group, 4, head_size, dtype, capability)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_auto_is_flashinfer_on_every_device_that_its_kernels_are_known_on(installed, capability):
    installed("flashinfer")
    names, reason = choose.automatic(shape(capability))
    assert names == ("flashinfer", "triton" if capability == (9, 0) else "flashinfer")
    assert reason is None


def test_auto_decodes_by_flashinfer_what_our_kernel_does_not_take(installed):
    installed("flashinfer")
    assert choose.automatic(shape(head_size=256)) == (("flashinfer", "flashinfer"), None)
    assert choose.automatic(shape(page_size=1)) == (("flashinfer", "flashinfer"), None)
    assert choose.automatic(shape(page_size=16)) == (("flashinfer", "flashinfer"), None)


@pytest.mark.parametrize("capability", [(7, 5), (8, 7), (11, 0), (9, 1), (13, 0)])
def test_auto_is_the_reference_on_any_other_device_and_says_so(installed, capability):
    installed("flashinfer")
    names, reason = choose.automatic(shape(capability))
    assert names == ("reference", "reference")
    assert reason == "no kernels are known to run on compute capability {}.{}".format(*capability)


def test_auto_is_the_reference_on_a_cpu_and_nothing_is_missing(installed):
    installed()
    assert choose.automatic(shape(None)) == (("reference", "reference"), None)


def test_auto_names_the_package_that_is_missing(installed):
    installed()
    names, reason = choose.automatic(shape())
    assert names == ("reference", "reference")
    assert reason is not None and "pip install 'minisgl[cuda]'" in reason


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"page_size": 16}, True),
        ({"page_size": 128}, True),
        ({"page_size": 1}, False),
        ({"page_size": 8}, False),
        ({"head_size": 64}, True),
        ({"head_size": 256}, False),
        ({"group": 8}, True),
        ({"group": 9}, False),
        ({"capability": (8, 9)}, False),
        ({"capability": (10, 0)}, True),
        ({"capability": (12, 0)}, True),
    ],
)
def test_xqa_runs_where_its_kernels_exist(fields, expected):
    assert flashinfer.has_xqa(shape(**fields)) is expected


@pytest.mark.parametrize(
    ("name", "phase", "fields", "reason"),
    [
        ("flashinfer", "prefill", {"dtype": torch.float32}, "bfloat16 and float16"),
        ("flashinfer", "decode", {"head_size": 80}, "heads of 64, 128, 256, not 80"),
        ("flashinfer", "decode", {"group": 17}, "not 17"),
        ("flashinfer", "decode", {"capability": (7, 5)}, "compute capability"),
        ("flashinfer", "decode", {"page_size": 1}, None),
        ("flash", "prefill", {}, None),
        ("flash", "prefill", {"capability": (8, 0)}, "flash-attn 4"),
        ("flash", "prefill", {"head_size": 80}, "heads of 64, 96 and 128"),
        ("flash", "decode", {}, "name another backend for decode"),
        ("triton", "prefill", {}, "name another backend for prefill"),
        ("triton", "decode", {}, None),
        ("triton", "decode", {"capability": (12, 0), "group": 17, "page_size": 128}, None),
        ("triton", "decode", {"capability": (7, 5)}, "8.0 and later"),
        ("triton", "decode", {"capability": None}, "not on a CPU"),
        ("triton", "decode", {"dtype": torch.float32}, "bfloat16 and float16"),
        ("triton", "decode", {"head_size": 256}, "heads of 64 and 128"),
        ("triton", "decode", {"page_size": 8}, "not 8"),
        ("triton", "decode", {"page_size": 48}, "not 48"),
        ("reference", "prefill", {"dtype": torch.float32, "head_size": 7, "capability": None}, None),
        ("reference", "decode", {"dtype": torch.float32, "head_size": 7, "capability": None}, None),
    ],
)
def test_a_backend_says_what_it_cannot_do(installed, name, phase, fields, reason):
    installed("flashinfer", "flash-attn-4")
    said = choose.why_not(name, shape(**fields), phase)
    assert (said is None) if reason is None else (reason in str(said))


def test_our_kernel_needs_triton(monkeypatch):
    monkeypatch.setattr(triton, "triton", None)
    assert "triton is not installed" in str(choose.why_not("triton", shape(), "decode"))


def test_flash_attn_2_takes_large_pages_and_older_devices(installed):
    installed("flash-attn")
    assert "multiples of 256" in str(choose.why_not("flash", shape((8, 0)), "prefill"))
    assert choose.why_not("flash", shape((8, 0), page_size=256), "prefill") is None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("auto", ("auto", "auto")),
        ("reference", ("reference", "reference")),
        ("flash", ("flash", "auto")),
        ("triton", ("auto", "triton")),
        ("flash, flashinfer", ("flash", "flashinfer")),
        ("reference,auto", ("reference", "auto")),
    ],
)
def test_one_name_is_for_both_phases_and_two_are_for_each(text, names):
    assert choose.named(text) == names


@pytest.mark.parametrize("text", ["", ",", "flash,", "a", "auto,auto,auto"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="attention_backend"):
        choose.named(text)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A FlashInfer without compiled kernels, and nothing to compile them with: its folder."""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise ImportError('not to be imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    return tmp_path


def program(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.touch(0o755)


def test_what_is_missing_to_compile_kernels_is_named_with_the_way_out(library):
    nvcc = "nvcc is not there: install a CUDA toolkit, or set CUDA_HOME to it"
    assert flashinfer.compiler_missing() == f"{nvcc}; ninja is not there: pip install ninja"
    program(library / "ninja")
    assert flashinfer.compiler_missing() == nvcc
    program(library / "bin" / "nvcc")
    assert flashinfer.compiler_missing() is None


def test_kernels_that_are_compiled_already_need_no_compiler(library):
    (library / "flashinfer" / "data" / "aot" / "xqa").mkdir(parents=True)
    assert flashinfer.compiler_missing() is None


@pytest.mark.parametrize(("backend", "warnings"), [("auto", 1), ("flashinfer,reference", 1), ("reference", 0)])
def test_a_missing_compiler_is_warned_of_where_flashinfer_is_chosen(library, monkeypatch, caplog, backend, warnings):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    config = EngineConfig(device="cuda", dtype="bfloat16", attention_backend=backend)
    with caplog.at_level(logging.WARNING):
        resolve_kernels(config, read_model_config(QWEN3))
    assert len(caplog.messages) == warnings
    assert all("needs nvcc and ninja" in said and "pip install ninja" in said for said in caplog.messages)


PACKAGES = ("flashinfer-python", "flash-attn-4", "flash-attn", "triton")


@pytest.mark.parametrize("packages", [(), *((name,) for name in PACKAGES), PACKAGES], ids=",".join)
def test_the_doctor_who_imports_no_torch_says_the_same(installed, monkeypatch, packages):
    installed(*(name.removesuffix("-python") for name in packages))
    monkeypatch.setattr(triton, "triton", object() if "triton" in packages else None)
    monkeypatch.setattr(machine, "installed", lambda name: "1.0" if name in packages else None)
    torch_here = Torch(version="2.11.0", cuda="13.0", devices=1, triton_fault=None)
    for capability in [(major, minor) for major in range(6, 15) for minor in range(10)]:
        gpu = Gpu(name="a GPU", memory_bytes=1, free_bytes=1, capability="{}.{}".format(*capability))
        (finding,) = checks.attention(Nvidia(driver="580", cuda="13.0", gpus=[gpu]), torch_here)
        here = shape(capability, page_size=256)
        assert re.match(r"auto takes (\w+)", finding.text)[1] == choose.automatic(here)[0][0], capability
        assert ("with triton to decode" in finding.text) == (choose.automatic(here)[0][1] == "triton"), capability
        assert ("triton (decode) by" in finding.text) == (choose.why_not("triton", here, "decode") is None)
        usable = {name for name in ("flashinfer", "flash") if not choose.why_not(name, here, "prefill")}
        assert set(re.findall(r"(\w+)(?: \(prefill\))? by ", finding.text)) == usable, capability
