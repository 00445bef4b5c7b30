"""Who may import whom: the table of docs/architecture.md, held against every import in the code."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

MAY_IMPORT: dict[str, set[str]] = {
    "minisgl": {"llm", "server", "config"},  # the public names
    "__main__": {"cli"},
    "cli": {
        "minisgl",
        "llm",
        "results",
        "scheduler",
        "server",
        "openai",
        "bench",
        "doctor",
        "chat",
        "profiling",
        "source",
        "config",
    },
    "chat": {"markdown", "server", "openai", "bench", "doctor", "results", "request", "source", "tokenizer", "config"},
    "markdown": set(),
    "server": {
        *("minisgl", "openai", "generation", "results", "scheduler", "request", "batch", "tokenizer", "source"),
        *("host", "config"),
    },
    "server.worker": {
        *("build", "engine", "profiling", "server", "generation", "scheduler", "request", "batch", "source"),
        "config",
    },
    "openai": {"llm", "generation", "results", "config"},
    "bench": {"minisgl", "llm", "results", "doctor", "source", "host", "config"},
    "doctor": {"minisgl", "source", "host"},
    "profiling": {
        *("bench", "doctor", "build", "engine", "generation", "scheduler", "server", "request", "batch", "source"),
        *("parallel", "host", "config"),
    },
    "llm": {"build", "engine", "scheduler", "generation", "results", "request", "tokenizer", "source", "config"},
    "generation": {"request", "results", "batch", "tokenizer", "config"},
    "results": {"request"},
    "build": {
        *("engine", "scheduler", "runtime", "model", "attention", "parallel", "source", "request", "batch", "host"),
        "config",
    },
    "engine": {"scheduler", "request", "batch", "config"},
    "scheduler": {"cache", "request", "batch", "config"},
    "cache": {"config"},
    "request": {"config"},
    "batch": {"config"},
    "runtime": {
        *("model", "attention", "kernels", "parallel", "source", "request", "batch", "host", "config"),
        "profiling",  # of ranks that follow, which rank 0 tells to record
    },
    "parallel": {"source", "batch", "host", "config"},
    "kernels": set(),
    "attention": {"kernels", "batch", "host", "config"},
    "model": {"attention", "kernels", "parallel", "source", "batch", "config"},
    "source": {"host", "config"},
    "tokenizer": set(),
    "host": set(),
    "config": set(),
}
"""Each part, and what of minisgl it may import; itself it always may. A new part needs a row."""

WITHOUT_TORCH = (
    *(
        "minisgl",
        "cli",
        "chat",
        "markdown",
        "server",
        "openai",
        "bench",
        "doctor",
        "generation",
        "results",
        "engine",
        "scheduler",
        "cache",
    ),
    *("request", "batch", "source", "tokenizer", "host", "config"),
)

WRAPPED = {"triton": {"attention", "kernels"}, "flashinfer": {"attention", "kernels"}, "flash_attn": {"attention"}}
"""Packages that need a GPU, and the parts whose modules wrap them."""


def modules() -> dict[str, Path]:
    """Every module of the project by its import name."""
    files = [*ROOT.glob("minisgl/**/*.py"), *ROOT.glob("cli/**/*.py")]
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def part_of(module: str) -> str:
    """`minisgl.cache.radix` is of the part cache, `minisgl_cli.run` and `cli.run` of cli; a module may have a row."""
    first, *rest = module.split(".")
    if first in ("cli", "minisgl_cli"):
        return "cli"
    if ".".join(rest) in MAY_IMPORT:
        return ".".join(rest)
    return rest[0] if rest else first


def imports(source: str, module: str) -> Iterator[str]:
    """The modules that the source of `module` imports, wherever in it, by absolute names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # `from minisgl import build` imports a module, `from minisgl import LLM` a name
            yield from (full if full in modules() else base for full in (f"{base}.{a.name}" for a in node.names))


def faults(source: str, module: str) -> list[str]:
    """What the source of `module` imports against the table."""
    part, found = part_of(module), []
    for name in imports(source, module):
        package = name.split(".")[0]
        if package in ("minisgl", "minisgl_cli", "cli"):
            allowed = part_of(name) in {part, *MAY_IMPORT[part]}
        elif package == "torch":
            allowed = part not in WITHOUT_TORCH
        elif package == "transformers":
            allowed = False
        else:
            allowed = part in WRAPPED.get(package, {part})
        if not allowed:
            found.append(f"{module} imports {name}")
    return found


def test_every_part_of_the_code_is_in_the_table():
    assert {part_of(module) for module in modules()} == set(MAY_IMPORT)


def test_no_module_imports_against_the_table():
    assert [fault for module, path in modules().items() for fault in faults(path.read_text(), module)] == []


def test_a_forbidden_import_is_found_wherever_it_hides():
    source = "\n".join(
        [
            "from minisgl.batch import Batch",
            "def late():",
            "    import torch.nn",
            "    from minisgl.runtime.runner import ModelRunner",
            "    from minisgl import build",
            "    from ..attention import base",
            "    import transformers, flashinfer",
        ]
    )
    assert faults(source, "minisgl.scheduler.scheduler") == [
        "minisgl.scheduler.scheduler imports torch.nn",
        "minisgl.scheduler.scheduler imports minisgl.runtime.runner",
        "minisgl.scheduler.scheduler imports minisgl.build",
        "minisgl.scheduler.scheduler imports minisgl.attention.base",
        "minisgl.scheduler.scheduler imports transformers",
        "minisgl.scheduler.scheduler imports flashinfer",
    ]


def test_the_parts_without_torch_import_where_there_is_none():
    names = [module for module in modules() if part_of(module) in WITHOUT_TORCH]
    script = "\n".join(
        [
            "import importlib, sys",
            "sys.modules.update(torch=None, transformers=None)",
            f"for name in {names}: importlib.import_module(name)",
        ]
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
