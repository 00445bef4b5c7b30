"""Where the user's lines come from: a terminal with all its keys, or a pipe."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession, completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.styles import Style

QUOTES = '"""'
FILE_COMMANDS = ("/read", "/save", "/load")
PROMPT = "> "
STYLE = {"prompt": "bold ansigreen", "bottom-toolbar": "noreverse", "bottom-toolbar.text": "ansibrightblack"}


def is_open(text: str) -> bool:
    """Whether the text begins with three quotes that are not closed."""
    return text.lstrip().startswith(QUOTES) and text.count(QUOTES) < 2


def unquoted(text: str) -> str:
    """The text without three quotes around it, and with ? for what is not Unicode."""
    text = text.encode(errors="replace").decode().strip()
    return text.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n") if text.startswith(QUOTES) else text


class TerminalPrompt:
    """A prompt with history, completion and an editor, and a line below that tells how things are."""

    def __init__(self, history: Path | None, words: Sequence[str], status: Callable[[], str]) -> None:
        """`words` can be completed, also beyond a space; behind some of them the name of a file can."""
        known = completion.WordCompleter([*words], sentence=True)
        completer = completion.merge_completers([known, FileCompleter(expanduser=True)])
        keys = KeyBindings()

        @keys.add("enter")
        def _(event: KeyPressEvent) -> None:
            buffer = event.current_buffer
            buffer.insert_text("\n") if is_open(buffer.text) else buffer.validate_and_handle()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            [("", "\n"), ("class:prompt", PROMPT)],
            **{"multiline": True, "prompt_continuation": lambda _, line, wraps: "  " if wraps else ". "},
            **{"key_bindings": keys, "enable_open_in_editor": True, "tempfile_suffix": ".md"},
            **{"history": _history(history), "completer": completer, "complete_while_typing": False},
            **{"bottom_toolbar": status, "style": Style.from_dict(STYLE)},
        )
        self.redraw = self._session.app.invalidate
        """To be called when there is another status."""

    async def read(self, draft: str) -> str | None:
        """What is entered, beginning with a draft: empty where the user gives it up, None where there is no more."""
        try:
            return await self._session.prompt_async(default=draft, handle_sigint=False, set_exception_handler=False)
        except KeyboardInterrupt:
            return ""
        except EOFError:
            return None


def _history(path: Path | None) -> History:
    """In a folder that only this user can enter; in memory where there is to be none, or the file cannot be used."""
    try:
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.open("a+").close()
            return FileHistory(path)
    except OSError as error:
        print(f"What is entered is not kept: {error}", file=sys.stderr)
    return InMemoryHistory()


class FileCompleter(completion.PathCompleter):
    """Completes the name of a file behind a command that takes one."""

    def get_completions(self, document: Document, complete_event: Any) -> Iterable[completion.Completion]:
        """What may stand at the cursor."""
        command, _, name = document.text_before_cursor.partition(" ")
        return super().get_completions(Document(name), complete_event) if command in FILE_COMMANDS else ()


class PipedPrompt:
    """Lines of stdin, read by a thread; three quotes begin a text of several lines."""

    def __init__(self, prompt: str) -> None:
        """To be made inside the event loop; `prompt` goes to stderr before each line."""
        self._prompt = prompt
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._tell = partial(asyncio.get_running_loop().call_soon_threadsafe, self._lines.put_nowait)
        threading.Thread(target=self._read, daemon=True, name="stdin").start()

    async def read(self, draft: str) -> str | None:
        """What comes next, None where nothing does; nothing here can edit a draft."""
        print(self._prompt, end="", file=sys.stderr, flush=True)
        text = await self._lines.get()
        while text is not None and is_open(text) and (line := await self._lines.get()) is not None:
            text = f"{text}\n{line}"
        if text is None and self._prompt:
            print(file=sys.stderr)
        return text

    def _read(self) -> None:
        """Unbuffered: a thread that waits inside a buffer of Python's own would hold its lock at exit."""
        with suppress(RuntimeError):  # the loop has ended
            with suppress(OSError):  # there is no stdin, or the terminal has gone
                for line in open(0, "rb", buffering=0, closefd=False):  # noqa: SIM115  stdin stays open
                    self._tell(line.decode(errors="replace").rstrip("\r\n"))
            for _ in range(2):  # the first may be the end of a text whose quotes were open
                self._tell(None)
