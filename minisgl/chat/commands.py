"""What can be entered beside questions: a table of names, and the functions that do it.

A function's docstring is its help; before the colon stands what the command takes. A ValueError of its own is what the
user reads.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from math import exp
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.columns import Columns
from rich.text import Text

from minisgl.chat.prompt import unquoted
from minisgl.chat.session import Session, checked
from minisgl.config import SamplingParams
from minisgl.openai.conversation import Conversation, Score, Turn, given, read_saved, request_body

KEYS = (
    'Several lines: Alt-Enter between them, or """ around them. Tab completes, Ctrl-X Ctrl-E opens the editor, Ctrl-C '
    "stops an answer and keeps what came, Ctrl-D leaves. /bye and /quit are /exit, /reset is /clear, /? is /help."
)
ALIASES: Mapping[str, str] = MappingProxyType({"/?": "/help", "/bye": "/exit", "/quit": "/exit", "/reset": "/clear"})
LEVELS = ((0.9, "green"), (0.5, "cyan"), (0.1, "yellow"), (0.0, "red"))
"""The colours of tokens, from which probability on."""
WORDS: Mapping[str, Any] = MappingProxyType({"on": True, "off": False, "default": None, "none": None})
"""Values that are not JSON."""


async def enter(session: Session, line: str) -> None:
    """Obey or ask; whatever goes wrong is a line for the user."""
    after, session.draft, session.draft_after = session.draft_after, "", None
    try:
        await (_obey(session, line) if line.startswith("/") else _ask(session, line, after))
    except Exception as error:
        session.fault(error)
    session.progress = "" if session.ready else session.progress


async def _ask(session: Session, line: str, after: Conversation | None) -> None:
    """Put a question, with the files that were to go with it; an edited one goes `after` what came before it."""
    if text := unquoted(line):
        if after is not None:
            session.change(after)
        question, session.attached = "\n\n".join([*session.attached, text]), []
        await session.ask(question)


async def _obey(session: Session, line: str) -> None:
    """Do what a line says that begins with a slash; a name that is none is answered with the nearest."""
    name, *rest = line.split(maxsplit=1)
    if (command := COMMANDS.get(ALIASES.get(name, name))) is None:
        hint = f"did you mean {near[0]}?" if (near := get_close_matches(name, COMMANDS, n=1, cutoff=0.5)) else ""
        raise ValueError(f"there is no {name}; {hint or '/help lists what there is'}")
    await command(session, "".join(rest).strip())


# --- the shell and the conversation


async def help_(session: Session, rest: str) -> None:
    """show this"""
    rows = [(name, *(command.__doc__ or "").rpartition(": ")[::2]) for name, command in COMMANDS.items()]
    session.screen.show({f"{name} {takes}": text for name, takes, text in rows})
    session.screen.note(KEYS)


async def exit_(session: Session, rest: str) -> None:
    """leave"""
    session.over = True


async def clear(session: Session, rest: str) -> None:
    """begin a new conversation, with the same system message"""
    session.change(Conversation(system=session.conversation.system))
    session.attached.clear()
    session.screen.note("a new conversation; /undo goes back")


async def system(session: Session, rest: str) -> None:
    """TEXT: set the system message; none takes it away, nothing shows it"""
    if rest:
        session.change(replace(session.conversation, system=None if rest == "none" else rest), session.unanswered)
    session.screen.show({"system": session.conversation.system or "none"})


async def regen(session: Session, rest: str) -> None:
    """answer the last question again"""
    await session.ask(*_last_question(session))


async def undo(session: Session, rest: str) -> None:
    """take back the last change of the conversation, be it an answer, /clear, /fork or another"""
    session.undo()
    _tell_turns(session)


async def edit(session: Session, rest: str) -> None:
    """change the last question, and ask it again"""
    if not session.screen.live:
        raise ValueError("/edit needs a terminal")
    session.draft, session.draft_after = _last_question(session)


async def fork(session: Session, rest: str) -> None:
    """N: go on from turn N; the engine still knows what came before it"""
    turns = _turns(session)
    session.change(session.conversation.with_turns(turns[: _number("/fork", rest, 0, len(turns))]))
    _tell_turns(session)


async def drop(session: Session, rest: str) -> None:
    """N: drop the N oldest turns, and ask again what did not fit"""
    turns = _turns(session)
    left = session.conversation.with_turns(turns[_number("/drop", rest, 1, len(turns)) :])
    session.change(left, session.unanswered)
    _tell_turns(session)
    if session.unanswered is not None:
        await session.ask(session.unanswered, left)


# --- files


async def read(session: Session, rest: str) -> None:
    """FILE: put a text file before the next question"""
    path = _path("/read", rest)
    text = (await asyncio.to_thread(path.read_text, encoding="utf-8")).strip()
    session.attached.append(f"{path.name}:\n\n{text}")
    session.screen.note(f"{path.name}, {len(text)} characters, goes with your next question")


async def save(session: Session, rest: str) -> None:
    """FILE: write the conversation as JSON, as the body of a request to OpenAI's API"""
    path = _path("/save", rest)
    try:
        if path.exists():
            read_saved(await asyncio.to_thread(path.read_bytes))
    except ValueError:
        raise ValueError(f"{path} is there, and no conversation: give another name") from None
    messages, model = session.conversation.messages(session.unanswered), (await session.backend()).name
    body = request_body(model, messages, session.sampling, session.thinking)
    path.write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    session.screen.note(f"saved in {path}: {len(messages)} messages")


async def load(session: Session, rest: str) -> None:
    """FILE: go on with a saved conversation and its settings"""
    path = _path("/load", rest)
    try:
        saved = read_saved(await asyncio.to_thread(path.read_bytes))
        session.sampling = checked(replace(session.sampling, **given(saved.sampling)))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from error
    session.change(saved.conversation, saved.question)
    session.thinking = session.thinking if saved.thinking is None else saved.thinking
    _tell_turns(session)


# --- settings


async def set_(session: Session, rest: str) -> None:
    """NAME VALUE: set a sampling parameter; default leaves it to the model"""
    name, text = (*re.split(r"\s*[=\s]\s*", rest, maxsplit=1), "")[:2]
    names = [f.name for f in fields(SamplingParams)]
    if name not in names:
        near = get_close_matches(name, names, n=1)
        raise ValueError(f"no parameter is called {name!r}: {f'did you mean {near[0]}?' if near else ', '.join(names)}")
    if not text:
        raise ValueError(f"/set {name} needs a value; default leaves it to the model")
    session.sampling = checked(replace(session.sampling, **{name: _value(name, text)}))
    session.screen.note(f"{name}: {given(session.sampling).get(name, 'left to the model')}")


def _value(name: str, text: str) -> Any:
    """JSON, or a word that stands for something, or the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return WORDS.get(text, text)
    if name == "logit_bias" and isinstance(value, dict):  # JSON has only texts as keys
        return {int(token) if token.isdecimal() else token: bias for token, bias in value.items()}
    return value


async def show(session: Session, rest: str) -> None:
    """[thinking]: show settings and turns, or what the model thought before its last answer"""
    if rest == "thinking":
        session.screen.note(_last(session).thinking or "the last answer came without thoughts")
        return
    thinking = {None: "as the model likes", True: "on", False: "off"}[session.thinking]
    settings = {"system": session.conversation.system or "none", "thinking": thinking} | given(session.sampling)
    turns = {f"turn {n}": _short(turn) for n, turn in enumerate(session.conversation.turns, start=1)}
    session.screen.show(settings | turns)


async def think(session: Session, rest: str) -> None:
    """let the model think before it answers, if it can choose"""
    session.thinking = True


async def nothink(session: Session, rest: str) -> None:
    """let it answer at once"""
    session.thinking = False


# --- what the engine does


async def stats(session: Session, rest: str) -> None:
    """show what was computed so far"""
    sums = [sum(getattr(c, name) or 0 for c in session.costs) for name in ("tokens_in", "cached", "tokens_out")]
    totals = {"answers": len(session.costs), "tokens": "in {} (cached {}), out {}".format(*sums)}
    session.screen.show(totals | dict(await (await session.backend()).facts()))


async def model(session: Session, rest: str) -> None:
    """[NAME]: show the model, or take another"""
    backend = await session.backend()
    if rest:
        await backend.use(rest)
    session.screen.show(await backend.facts())


async def tokens(session: Session, rest: str) -> None:
    """show the last answer token by token, coloured by probability"""
    cells = []
    for number, (text, logprob, _) in enumerate(await _scores(session), start=1):
        style = next(style for least, style in LEVELS if exp(logprob) >= least)
        # Quoted, so that spaces and line ends are seen.
        cells.append(Text.assemble(f"{number} ", (repr(text), style), f" {exp(logprob):.0%}", overflow="fold"))
    session.screen.show(Columns(cells, padding=(0, 2)))
    session.screen.note("/logprobs N shows what else token N could have been")


async def logprobs(session: Session, rest: str) -> None:
    """N: show what else token N of the last answer could have been"""
    scores = await _scores(session)
    chosen, logprob, top = scores[_number("/logprobs", rest, 1, len(scores)) - 1]
    either = dict([*top, (chosen, logprob)]).items()
    session.screen.show({f"{text!r}": f"{exp(p):6.1%}  {p:7.3f}{'  *' * (text == chosen)}" for text, p in either})


async def _scores(session: Session) -> list[Score]:
    """Those of the last answer; found out once."""
    turn = _last(session)
    turn.scores = turn.scores or await (await session.backend()).score(turn)
    return turn.scores


# --- what several have in common


def _turns(session: Session) -> Sequence[Turn]:
    if not session.conversation.turns:
        raise ValueError("there are no turns yet")
    return session.conversation.turns


def _last(session: Session) -> Turn:
    return session.only_thoughts or _turns(session)[-1]


def _last_question(session: Session) -> tuple[str, Conversation]:
    """The question, and the conversation before it."""
    if session.unanswered is not None:
        return session.unanswered, session.conversation
    return _turns(session)[-1].question, session.conversation.with_turns(session.conversation.turns[:-1])


def _number(command: str, text: str, least: int, most: int) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise ValueError(f"{command} takes a number from {least} to {most}, got {text!r}")
    return int(text)


def _path(command: str, text: str) -> Path:
    if not text:
        raise ValueError(f"{command} takes a file's name")
    path = Path(text).expanduser()
    if path.exists() and not path.is_file():  # others may never end
        raise ValueError(f"{path} is no ordinary file")
    return path


def _short(turn: Turn) -> str:
    return " ".join(turn.question.split())[:60]


def _tell_turns(session: Session) -> None:
    turns = session.conversation.turns
    last = f"; the last one: {_short(turns[-1])}" if turns else ""
    open_ = "; /regen answers the question that has no answer" if session.unanswered is not None else ""
    session.screen.note(f"{len(turns)} turn{'' if len(turns) == 1 else 's'}{last}{open_}")


ALL = (help_, exit_, clear, system, set_, show, regen, undo, edit, fork, drop, read, save, load)
ALL += (think, nothink, tokens, logprobs, stats, model)
COMMANDS: Mapping[str, Callable[[Session, str], Awaitable[None]]] = MappingProxyType(
    {f"/{each.__name__.rstrip('_')}": each for each in ALL}
)
