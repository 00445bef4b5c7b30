"""minisgl: a compact, fast engine that runs large language models.

Public names are loaded on first use, so that importing the package, or one part of it, brings in no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.config import EngineConfig, SamplingParams
    from minisgl.llm import LLM
    from minisgl.server.client import EngineClient

__version__ = "0.1.0"
__all__ = ["LLM", "EngineClient", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    homes = {
        "LLM": "minisgl.llm",
        "EngineClient": "minisgl.server.client",
        "EngineConfig": "minisgl.config",
        "SamplingParams": "minisgl.config",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
