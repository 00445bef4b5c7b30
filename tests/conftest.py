"""What all tests share: the markers' meaning, in one place."""

import ctypes
import os

import pytest

try:
    ctypes.CDLL("libcuda.so.1")
except OSError:  # no driver, no GPU: Triton's kernels are interpreted, which must be said before any is imported
    os.environ["TRITON_INTERPRET"] = "1"


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
