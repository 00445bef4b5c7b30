"""What tests of several folders share, and the markers' meaning, in one place."""

import ctypes
import os
import subprocess
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:  # no driver, no GPU: Triton's kernels are interpreted, which must be said before any is imported
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _interpreted_loops() -> None:
    """Let Triton's interpreter take a loop's bounds from a kernel's numbers: it knows them as arrays of one element."""
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter = import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The ranks that are started, as they are."""
    from minisgl.parallel import crew

    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, own: Any = crew._start) -> subprocess.Popen[bytes]:
        processes.append(own(*arguments))
        return processes[-1]

    monkeypatch.setattr(crew, "_start", start)
    return processes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--equality-full", action="store_true", help="compare the default model in every setting, not in a selection"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; torch is asked only if such a test was collected."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
