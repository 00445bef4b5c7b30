"""What the documents say is true: commands parse, links lead somewhere, Python compiles."""

import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_llm import FakeLLM
from rich.console import Console

from cli.app import app
from minisgl.source.hub import ModelFolder

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EACH = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(text: str, *languages: str) -> Iterator[str]:
    return (body for language, body in BLOCK.findall(text) if language in languages)


def commands(text: str) -> Iterator[list[str]]:
    """The `minisgl` commands in a document's code blocks, as words; a console block has its output beside them."""
    lines = [line for body in blocks(text, "bash", "sh") for line in body.replace("\\\n", " ").splitlines()]
    for body in blocks(text, "console"):
        lines += [line[2:] for line in body.replace("\\\n", " ").splitlines() if line.startswith("$ ")]
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, "&&"]:
            if set(word) <= set("();<>|&"):
                yield from _minisgl(words)
                words = []
            else:
                words.append(word)


def _minisgl(words: list[str]) -> Iterator[list[str]]:
    while words and re.fullmatch(r"\w+=.*", words[0], re.DOTALL):
        words = words[1:]  # a variable for this command
    for start in (["minisgl"], ["python", "-m", "minisgl"]):
        if words[: len(start)] == start:
            yield words[len(start) :]


ALL_COMMANDS = sorted({shlex.join(words) for document in DOCUMENTS for words in commands(document.read_text())})


def test_the_readme_shows_commands():
    assert 'run "What is the capital of France?"'.replace('"', "'") in ALL_COMMANDS


async def served(*_: object) -> int:
    return 0


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_the_real_parser_takes_a_documented_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The documented files are there; nothing behind the parser runs.
    files = (("README.md", "options.toml"), ("README.md", "requests.jsonl"), ("docs/serving.md", "serve.toml"))
    for document, name in files:
        (text,) = blocks((ROOT / document).read_text(), name.rpartition(".")[2])
        (tmp_path / name).write_text(text)
    (tmp_path / "bench_configs").symlink_to(ROOT / "bench_configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a question")))
    monkeypatch.setattr("cli.doctor.examine", lambda: [])
    monkeypatch.setattr("minisgl.source.hub.locate", lambda name, *_, **__: ModelFolder(tmp_path, name, {}))
    monkeypatch.setattr("cli.models.cached_models", lambda: [])
    monkeypatch.setattr("cli.models.find_cached", lambda _: SimpleNamespace(size_bytes=1, remove=lambda: None))
    monkeypatch.setattr("cli.run.start", lambda *_: FakeLLM())
    monkeypatch.setattr("cli.serve.start", lambda *_: FakeLLM())
    monkeypatch.setattr("minisgl.bench.offline.measure", lambda *_: None)
    monkeypatch.setattr("minisgl.bench.online.measure", lambda *_: None)
    monkeypatch.setattr("minisgl.bench.compare.compare_files", lambda *_: False)
    monkeypatch.setattr("minisgl.profiling.profile.profile", lambda *_: None)
    monkeypatch.setattr("minisgl.profiling.report.compare", lambda *_: False)
    monkeypatch.setattr("minisgl.chat.shell.chat", lambda *_: 0)
    for each in ("run", "profile", "bench", "chat", "serve"):
        monkeypatch.setattr(f"cli.{each}.start_logging", lambda *_, **__: Console(stderr=True))
    monkeypatch.setattr("minisgl.server.supervisor.Supervisor.run", served)
    assert app(shlex.split(command), standalone_mode=False) in (None, 0)


def test_commands_are_found_among_what_stands_around_them():
    text = (
        '```console\n$ pip install -e . && minisgl run "a b" | head -1\nminisgl run output\n```\n'
        "```bash\nTP=1 minisgl run x \\\n  --raw  # why\npython -m minisgl --help > out\n```\n"
        "```text\nminisgl run not-a-command\n```\n"
    )
    assert sorted(commands(text)) == [["--help"], ["run", "a b"], ["run", "x", "--raw"]]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@EACH
def test_every_relative_link_leads_to_a_file_and_a_heading_in_it(document: Path):
    for target in LINK.findall(BLOCK.sub("", document.read_text())):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = document.parent / path if path else document
        assert file.exists(), target
        assert not anchor or anchor in map(slug, HEADING.findall(BLOCK.sub("", file.read_text()))), target


@EACH
def test_every_python_block_compiles(document: Path):
    for body in blocks(document.read_text(), "python"):
        compile(body, str(document), "exec")
