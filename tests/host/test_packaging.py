"""The wheel: a clean environment gets every module of the tree from it, and the `minisgl` command."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from minisgl import __version__

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what setuptools reads, because it leaves its traces in the tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("minisgl", "cli", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, ".", cwd=tree)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new environment that has the wheel, and beside it this one's packages but not its minisgl."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", f"--python={python}", "install", "--no-deps", "--no-index", wheel, cwd=home)
    # A plain path is read for packages only: the hook of an editable install there does not run.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


def modules(files: Iterable[str]) -> set[str]:
    """Import names of the Python files among `files`."""
    return {f.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for f in files if f.endswith(".py")}


def test_the_wheel_holds_the_whole_tree_and_nothing_else(wheel: Path):
    files = zipfile.ZipFile(wheel).namelist()
    library = modules(str(f.relative_to(ROOT)) for f in ROOT.glob("minisgl/**/*.py"))
    commands = modules(str("minisgl_cli" / f.relative_to(ROOT / "cli")) for f in ROOT.glob("cli/**/*.py"))
    assert modules(files) == library | commands
    assert {file.split("/")[0] for file in files} == {"minisgl", "minisgl_cli", f"minisgl-{__version__}.dist-info"}
    assert any(file.endswith("/licenses/LICENSE") for file in files) and "minisgl/py.typed" in files


def test_every_module_of_the_wheel_imports_in_a_clean_environment_without_cuda(
    wheel: Path, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names = sorted(modules(zipfile.ZipFile(wheel).namelist()))
    script = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    file = importlib.import_module(name).__file__\n"
        "    assert file is None or file.startswith(sys.prefix), file\n"
    )
    run(python, "-c", script, cwd=tmp_path)


@pytest.mark.parametrize("command", [["bin/minisgl"], ["bin/python", "-m", "minisgl"]])
def test_the_command_runs_in_a_clean_environment(command: list[str], python: Path, tmp_path: Path):
    program, *arguments = command
    home = python.parents[1]
    assert run(home / program, *arguments, "--version", cwd=tmp_path) == f"minisgl {__version__}\n"
