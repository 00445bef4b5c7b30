"""The entry point of `minisgl`: it turns errors and signals into messages and exit codes.

The app is imported inside `main`, so that Ctrl-C is quiet from the first moment.
"""

import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code: 1 after an error, 2 after wrong usage.

    SIGINT and SIGTERM end it through SystemExit with 128 + the signal's number, so every `with` on the way is left
    as it should be; a second signal ends the process at once.
    """
    for number in SIGNALS:
        signal.signal(number, _stop)
    _open_streams()
    try:
        from .app import app

        return app(arguments, prog_name="minisgl", standalone_mode=False) or 0
    except Exception as error:
        return _explain(error)
    finally:
        _release_signals()
        _flush_output()


def _open_streams() -> None:
    """Make do with streams that are closed (`minisgl … >&-`) or whose encoding lacks a character."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _stop(number: int, _: FrameType | None) -> NoReturn:
    _release_signals()
    raise SystemExit(128 + number)


def _release_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _explain(error: Exception) -> int:
    import logging
    import traceback

    if show := getattr(error, "show", None):  # a usage error, whose class has moved between versions of Typer
        show()
        return getattr(error, "exit_code", 2)
    if not isinstance(error, ValueError | OSError | ImportError):
        raise error  # a fault of ours: the traceback is the message
    if os.environ.get("MINISGL_DEBUG") or logging.getLogger("minisgl").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    print(f"Error: {error}", file=sys.stderr)
    return 1


def _flush_output() -> None:
    """Flush here rather than at exit, where a reader that has gone (`minisgl … | head -1`) would be an error."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
