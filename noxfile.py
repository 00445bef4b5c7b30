"""The checks of minisgl: `nox` runs those that every change must pass, `nox -s NAME` any one.

`types`, `tests` and `equality` share one virtual environment, because torch takes most of a minute to install.
"""

import nox

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "tests"]

PINNED = ("-c", "constraints.txt")
SHARED = ".nox/environment/bin/python"


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and format."""
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(reuse_venv=True)
def environment(session: nox.Session) -> None:
    """The environment that other sessions share: minisgl as `pip install -e .` leaves it, and what the tests need."""
    session.install(*PINNED, "-e", ".[dev]")


@nox.session(venv_backend="none", requires=["environment"])
def types(session: nox.Session) -> None:
    """Pyright."""
    session.run(SHARED, "-m", "pyright", "--pythonpath", SHARED, external=True)


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Pytest, without what needs a GPU, two files at a time; arguments after `--` are passed on.

    One thread of torch each: its threads wait for each other by spinning.
    """
    together = ("-n", "2", "--dist", "loadfile")
    session.run(SHARED, "-m", "pytest", *together, *session.posargs, env={"OMP_NUM_THREADS": "1"}, external=True)


@nox.session(venv_backend="none", requires=["environment"])
def equality(session: nox.Session) -> None:
    """The default model against transformers, token for token, in every setting; takes long."""
    session.run(SHARED, "-m", "pytest", "-m", "real_model", "--equality-full", *session.posargs, external=True)


@nox.session
def gpu(session: nox.Session) -> None:
    """Pytest's `gpu` tests on this machine's CUDA device, with the kernel libraries; unpinned torch."""
    session.install("-e", ".[cuda,flash-attn,dev]")
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)
