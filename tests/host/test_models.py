"""`minisgl models`: what is in the caches, and what it takes away."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.app import app
from minisgl.source.alias import ALIASES
from minisgl.source.hub import ModelFolder
from minisgl.source.inventory import cached_models, find_cached

MINE = "[mine]-0123456789abcdef"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches, with a model of each kind, and a file outside that links lead to."""
    own, hub = tmp_path / "own", tmp_path / "hub"
    monkeypatch.setenv("MINISGL_CACHE", str(own))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    write(tmp_path / "outside" / "tokenizer.model", 10)
    write(own / ALIASES["smollm2"].file_name, 100)
    write(own / "imported" / "smollm2-0123456789abcdef" / "model.safetensors", 300)
    write(own / "imported" / "smollm2-fedcba9876543210" / "model.safetensors", 400)
    mine = own / "imported" / MINE
    write(mine / "tokenizer.json", 50)
    (mine / "tokenizer.model").symlink_to(tmp_path / "outside" / "tokenizer.model")
    write(own / "imported" / f".{MINE}.lock", 0)
    repo = hub / "models--some--repo"
    write(repo / "blobs" / "abc", 70)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "config.json").symlink_to("../../blobs/abc")
    write(repo / "refs" / "main", 0).write_text(COMMIT)
    write(hub / "models--interrupted" / "blobs" / "abc.incomplete", 60)
    return tmp_path


def write(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    os.utime(path, (86400.0 * 365, 86400.0 * 300))
    return path


def models(*arguments: str) -> int:
    return app(["models", *arguments], standalone_mode=False) or 0


def test_the_list_has_name_kind_and_size_of_all(capsys: pytest.CaptureFixture[str]):
    assert models("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["kind"], model["size_bytes"]) for model in found] == [
        (MINE, "imported", 50),
        ("interrupted", "hub", 60),
        ("smollm2", "alias", 800),
        ("some/repo", "hub", 70),
    ]
    assert {model["used_s"] for model in found} == {86400.0 * 365}, "and looking is no use of them"
    assert models() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["smollm2", "alias", "0", "MB", "1971-01-01"] in rows
    assert [MINE, "imported", "0", "MB", "1971-01-01"] in rows


def test_where_there_is_none_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("MINISGL_CACHE", str(tmp_path / "none"))
    for name in ("some/repo", "interrupted"):
        find_cached(name).remove()
    assert cached_models() == []
    assert models() == 0
    assert "`minisgl models pull smollm2`" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["smollm2", MINE, "some/repo", "interrupted"])
def test_what_is_removed_is_gone_and_all_else_stays(name: str, caches: Path):
    others = [model.name for model in cached_models() if model.name != name]
    before = find_cached(name).size_bytes
    size = sum(path.lstat().st_size for path in caches.rglob("*") if path.is_file() and not path.is_symlink())
    assert models("rm", name, "--yes") == 0
    assert [model.name for model in cached_models()] == others
    assert (caches / "outside" / "tokenizer.model").stat().st_size == 10
    left = sum(path.lstat().st_size for path in caches.rglob("*") if path.is_file() and not path.is_symlink())
    assert size - left - before in (0, len(COMMIT))  # the hub's note of the branch goes too
    assert not list(caches.rglob("*.removed"))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("smolm2", r"did you mean smollm2\?"), ("../outside", "no ../outside"), ("", "there is no"), ("/", "there is no")],
)
def test_a_name_that_is_not_in_the_list_is_refused(name: str, hint: str, caches: Path):
    with pytest.raises(ValueError, match=hint):
        models("rm", name, "--yes")
    assert len(cached_models()) == 4 and (caches / "outside" / "tokenizer.model").exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("said", "code", "left"), [("y\n", 0, 3), ("n\n", 1, 4), ("\n", 1, 4), ("", 1, 4)])
def test_it_asks_before_it_removes(said: str, code: int, left: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", Terminal(said))
    assert models("rm", "smollm2") == code
    assert len(cached_models()) == left


def test_without_a_terminal_to_ask_on_it_needs_yes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ValueError, match="give --yes"):
        models("rm", "smollm2")
    assert len(cached_models()) == 4


def test_pull_passes_the_revision_on_shows_progress_and_prints_where_the_model_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[Any] = []

    def locate(name: str, revision: str | None, *, report: Any) -> ModelFolder:
        asked.append((name, revision))
        report(f"downloading {name}", 1, 2)
        return ModelFolder(Path("/models/x"), name, {})

    monkeypatch.setattr("minisgl.source.hub.locate", locate)
    assert models("pull", "some/repo", "--revision", "v2") == 0
    assert asked == [("some/repo", "v2")]
    out, err = capsys.readouterr()
    assert out == "/models/x\n" and "downloading some/repo" in err


def test_pull_of_what_there_is_not_is_an_error():
    with pytest.raises(ValueError, match="there is no file or folder"):
        models("pull", "./none")
