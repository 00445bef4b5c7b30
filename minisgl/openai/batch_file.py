"""Files in OpenAI's batch format: requests in, results out, one JSON object a line.

The results file is also the record of what is done. A line is written whole or, by whoever is interrupted, not to its
end; so what can be read there is true, and the next run does the rest.
"""

import fcntl
import json
import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from minisgl.openai.answers import error_body, new_id
from minisgl.openai.protocol import CHAT, COMPLETIONS, ROUTES, RequestError

_ROW_BEGINS = b'{"id": "batch_req_'  # what tells a result that was cut off from a file that is not ours


@dataclass(frozen=True)
class Row:
    """A request of the file."""

    custom_id: str
    fields: Mapping[str, Any]

    def route_and_body(self) -> tuple[str, Any]:
        """What is asked of whom. A row without a `url` says it by its body. Raises RequestError."""
        if unknown := self.fields.keys() - {"custom_id", "method", "url", "body"}:
            raise RequestError(
                f"{min(unknown)} is not a field of a batch row (custom_id, method, url, body): move it into the body",
                param=min(unknown),
            )
        body = self.fields.get("body")
        route = self.fields.get("url", COMPLETIONS if isinstance(body, dict) and "prompt" in body else CHAT)
        if route not in ROUTES:
            raise RequestError(f"url must be {' or '.join(ROUTES)}, got {route!r:.200}", param="url")
        if (method := self.fields.get("method", "POST")) != "POST":
            raise RequestError(f"method must be POST, got {method!r:.200}", param="method")
        return route, body


@dataclass(frozen=True)
class Survey:
    """What a file of requests holds."""

    offsets: dict[str, int]  # where the row of a custom_id begins, in bytes; in the file's order
    faults: list[str]  # lines that cannot have a result, each with its number and what is wrong


def survey(file: IO[bytes]) -> Survey:
    """Look through a file of requests once; it must be one that can be read again."""
    offsets: dict[str, int] = {}
    first_lines: dict[str, int] = {}
    faults: list[str] = []
    at = 0
    for number, line in enumerate(file, start=1):
        begin, at = at, at + len(line)
        if not line.strip():
            continue
        try:
            custom_id = read_row(line).custom_id
            if custom_id in offsets:
                raise ValueError(f"has the custom_id {custom_id!r:.80} of line {first_lines[custom_id]}")
        except ValueError as error:
            faults.append(f"line {number} {error}")
        else:
            offsets[custom_id], first_lines[custom_id] = begin, number
    return Survey(offsets, faults)


def read_lines(file: IO[bytes], offsets: Mapping[str, int], done: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The custom_ids that are not done, in the order of a file that was surveyed, each with its line."""
    for custom_id, offset in offsets.items():
        if custom_id not in done:
            file.seek(offset)
            yield custom_id, file.readline()


def read_row(line: bytes) -> Row:
    """Raises ValueError, which goes on after `line 7`, for a line that no result could be named after."""
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"is not a JSON object but {fields!r:.80}")
    custom_id = fields.get("custom_id")
    if custom_id is None:
        raise ValueError("has no custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(f"has a custom_id that is not a text: {custom_id!r:.80}")
    return Row(custom_id, fields)


# --- results


def result_row(custom_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The result of a request that was answered with `body`."""
    return _result(custom_id, 200, body, None)


def error_row(custom_id: str, error: ValueError) -> dict[str, Any]:
    """The result of a request that cannot run."""
    body = error_body(error)
    code = body["error"]["code"] or body["error"]["type"]
    status = error.status if isinstance(error, RequestError) else 400
    return _result(custom_id, status, body, {"code": code, "message": str(error)})


def _result(custom_id: str, status: int, body: Mapping[str, Any], error: Mapping[str, Any] | None) -> dict[str, Any]:
    response = {"status_code": status, "request_id": new_id("req_"), "body": body}
    return {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}


class Results:
    """Where results go; what `write` has returned from is not lost with this process."""

    def __init__(self, file: IO[bytes], name: str, done: Collection[str] = ()) -> None:
        self.done = done
        """The custom_ids that have their answer already."""
        self._file, self._name = file, name

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError, naming the file, when the disk is full or the reader has gone."""
        line = memoryview(_line(row))
        try:
            while line:
                line = line[self._file.write(line) :]
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, f"cannot write to it: {error.strerror}", self._name) from error


@contextmanager
def open_results(path: Path, ids: Collection[str]) -> Iterator[Results]:
    """A results file to go on with, held by this process alone.

    What it has already stays, but for a last line that was cut off and the errors of requests among `ids`, which are
    tried again. Raises ValueError for a file that cannot be written or that holds something else.
    """
    with ExitStack() as stack:
        try:
            # Held until the end, also when another file takes its place: the lock is what keeps others out.
            file = stack.enter_context(open(path, "ab", buffering=0))
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe, a terminal, /dev/null
            yield Results(file, str(path))
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is writing {path}: wait for it, or name another file") from None
        done, dropped, ended = _read_results(path, ids)
        if dropped or not ended:
            file = stack.enter_context(_without(path, dropped))
        yield Results(file, str(path), done)


def _read_results(path: Path, ids: Collection[str]) -> tuple[set[str], set[int], bool]:
    """The custom_ids that are done, the numbers of the lines that are not to stay, and whether the last has its end."""
    done, dropped, ended = set(), set(), True
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            ended = line.endswith(b"\n")
            try:
                custom_id, good = _outcome(line)
            except (ValueError, LookupError, TypeError, RecursionError):
                if ended or not (line.startswith(_ROW_BEGINS) or _ROW_BEGINS.startswith(line)):
                    raise ValueError(
                        f"line {number + 1} of {path} is not a result: "
                        "name a new file, or one that an earlier run wrote"
                    ) from None
                dropped.add(number)
                continue
            if good:
                done.add(custom_id)
            elif custom_id in ids:
                dropped.add(number)
    return done, dropped, ended


def _outcome(line: bytes) -> tuple[str, bool]:
    """Whose result a line is, and whether it is an answer; raises one of several errors where it is no result."""
    row = json.loads(line)
    custom_id = row["custom_id"]
    if not isinstance(custom_id, str):
        raise TypeError
    return custom_id, row["error"] is None and row["response"]["status_code"] == 200


def _without(path: Path, dropped: Collection[int]) -> IO[bytes]:
    """Put a copy without these lines into the place of a file, in one step; returns the copy, open for appending.

    The last line gets its end, where only that was cut off.
    """
    place = path.resolve()  # of a link, what it leads to
    copy = place.with_name(f".{place.name}.partial")
    try:
        with open(place, "rb") as old, open(copy, "wb") as new:
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))
            kept = (line for number, line in enumerate(old) if number not in dropped)
            new.writelines(line if line.endswith(b"\n") else line + b"\n" for line in kept)
            new.flush()
            os.fsync(new.fileno())
        with ExitStack() as opened:
            file = opened.enter_context(open(copy, "ab", buffering=0))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(copy, place)
            opened.pop_all()  # the caller's to close
            return file
    except BaseException as error:
        with suppress(OSError):
            copy.unlink()
        if isinstance(error, OSError):
            raise ValueError(f"cannot rewrite {path}: {error.strerror} ({copy})") from error
        raise


def _line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can only write as an escape
        return f"{json.dumps(row)}\n".encode()
