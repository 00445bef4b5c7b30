"""Let a Typer command take whole dataclasses as parameters.

Each field becomes an option. What sets it, from strongest to weakest: a flag, its environment variable, its key in
the TOML file given with `--config`, the field's default. Text is only converted here; the dataclass judges every
value, wherever it came from, so rules and messages stand in one place.
"""

import dataclasses
import inspect
import json
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer
from annotated_doc import Doc

from minisgl.config import EngineConfig, Flag, alternatives

PREFIX = "MINISGL_"
ELSEWHERE = ("MINISGL_CACHE", "MINISGL_DEBUG")
"""Variables that are not options."""
TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Setting(NamedTuple):
    """A value that the user gave, and where: `--tp`, `MINISGL_TP` or `tp in serve.toml`."""

    value: Any
    origin: str


@dataclass(frozen=True, kw_only=True)
class Option:
    """A dataclass field as the command line sees it."""

    name: str
    kind: type  # bool, int, float or str; of a repeatable one and of a map, of each value
    choices: tuple[str, ...]
    repeatable: bool
    key: type | None  # of a map: the type of its keys; it is written as one JSON object
    default: Any
    doc: str
    panel: str
    spelling: Flag

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def env(self) -> str:
        return self.spelling.env or f"{PREFIX}{self.name.upper()}"

    @property
    def valued(self) -> tuple[str, ...]:
        """Flags that are followed by a value."""
        return () if self.kind is bool else (self.flag, *self.spelling.aliases)

    @property
    def constants(self) -> dict[str, Any]:
        """Flags that are followed by nothing, and the value that each stands for."""
        flags = dict(self.spelling.shorthands)
        if self.kind is bool:
            flags = dict.fromkeys((self.flag, *self.spelling.aliases), True) | {f"--no-{self.flag[2:]}": False} | flags
        return flags

    @property
    def help(self) -> str:
        """The field's `Doc`, then what may be given, the default where it tells something, other spellings."""
        notes = [", ".join(self.choices)] if self.choices else []
        if self.default is not None and self.default is not False:
            notes.append(f"default: {_word(self.default)}")
        for value, flags in groupby((f for f in self.constants if f != self.flag), key=self.constants.__getitem__):
            notes.append(f"{_word(value)}: {', '.join(flags)}")
        if len(self.valued) > 1:
            notes.append(f"also {', '.join(self.valued[1:])}")
        return f"{self.doc} ({'; '.join([*notes, f'env: {self.env}'])})"

    def convert(self, text: str) -> Any:
        """What `text` stands for; a text that makes no sense stays one, for the dataclass to refuse."""
        if self.kind is bool:
            return TRUTH.get(text.lower(), text)
        try:
            return self.kind(text) if self.key is None else self.map(json.loads(text))
        except ValueError:
            return text

    def map(self, value: Any) -> Any:
        """A map with its keys, which JSON and TOML write as text, in their own type; what is none stays as it is."""
        assert self.key is not None
        if not isinstance(value, dict):
            return value
        try:
            return {self.key(text): each for text, each in value.items()}
        except ValueError:
            return value


def command(app: typer.Typer, function: Callable[..., None]) -> None:
    """Like `app.command()(function)`, with every dataclass parameter spread into one option per field.

    A field is `Annotated[type, Doc(help)]`, with a `Flag` where its name does not say it all; the first line of the
    class docstring heads its help panel. Other parameters are Typer's own. `--config` is added.
    """
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    groups = _groups(function)
    listed = [option for group in groups.values() for option in _options(group)]
    options = {option.name: option for option in listed}

    def run(**given: Any) -> None:
        settings = _from_file(given.pop("config"), options)
        settings |= _from_environment(options, os.environ)
        settings |= _from_flags(options, given)
        given |= {name: _build(group, settings) for name, group in groups.items()}
        function(**given)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters if p.name not in groups]
    derived = [p for option in listed for p in _parameters(option)]  # Signature refuses a name that comes twice
    run.__signature__ = inspect.Signature([*own, _CONFIG, *derived])  # type: ignore[attr-defined]
    app.command()(run)


def with_model(config: EngineConfig, name: str | None, context: typer.Context) -> EngineConfig:
    """The same with the model that an argument names, where one does: it may not contradict --model."""
    if name is not None and set(context.params["model"] or ()) - {name}:
        raise typer.BadParameter("give the model once, as an argument or as --model", param_hint="MODEL")
    return config if name is None else dataclasses.replace(config, model=name)


def unknown_variables(functions: Sequence[Callable[..., None]], environ: Mapping[str, str]) -> Iterator[str]:
    """What to say of each `MINISGL_…` variable that no option of these commands, nor anything else, looks at."""
    known = {option.env for each in functions for group in _groups(each).values() for option in _options(group)}
    words = [name.removeprefix(PREFIX) for name in (*known, *ELSEWHERE)]
    for word in sorted(name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX)):
        if word not in words:
            near = get_close_matches(word, words, n=1)
            hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
            yield f"{PREFIX}{word} is not a variable of minisgl{hint}"


def _groups(function: Callable[..., None]) -> dict[str, Any]:
    """The dataclass parameters of a command."""
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    return {p.name: p.annotation for p in parameters if dataclasses.is_dataclass(p.annotation)}


def _options(group: Any) -> Iterator[Option]:
    panel = (group.__doc__ or group.__name__).splitlines()[0]
    for field in dataclasses.fields(group):
        hint, *notes = get_args(field.type)
        kinds = [kind for kind in alternatives(hint) if kind is not NoneType]
        elements = [get_args(kind)[0] for kind in kinds if get_origin(kind) is Sequence]
        key, kind = get_args(kinds[0]) if get_origin(kinds[0]) is Mapping else (None, (elements or kinds)[0])
        is_choice = get_origin(kind) is Literal
        yield Option(
            name=field.name,
            kind=str if is_choice else kind,
            choices=get_args(kind) if is_choice else (),
            repeatable=bool(elements),
            key=key,
            default=field.default,
            doc=next(note.documentation for note in notes if isinstance(note, Doc)),
            panel=panel,
            spelling=next((note for note in notes if isinstance(note, Flag)), Flag()),
        )


def _word(value: Any) -> str:
    return "on" if value is True else "off" if value is False else str(value)


# --- what Typer sees: each spelling is a parameter of its own, and takes several values, so that none is lost unseen


def _parameters(option: Option) -> Iterator[inspect.Parameter]:
    written = {int: "INTEGER", float: "NUMBER"}.get(option.kind, "TEXT")
    metavar = "JSON" if option.key else "CHOICE" if option.choices else written
    for flag in (*option.valued, *option.constants):
        info = typer.Option(
            flag,
            help=option.help,
            metavar=metavar if flag in option.valued else "",
            rich_help_panel=option.panel,
            hidden=flag != option.flag,
            autocompletion=lambda incomplete: [c for c in option.choices if c.startswith(incomplete)],
        )
        yield _parameter(flag, list[str] | None if flag in option.valued else bool, info)


def _parameter(flag: str, kind: Any, info: Any) -> inspect.Parameter:
    default = False if kind is bool else None
    annotation = Annotated[kind, info]
    return inspect.Parameter(_identifier(flag), inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _identifier(flag: str) -> str:
    """`--max-tokens` is the parameter max_tokens; `-n` is _n, beside the n of `--n`."""
    return flag.removeprefix("--").replace("-", "_")


_CONFIG = _parameter(
    "--config",
    list[Path] | None,
    typer.Option(
        help="TOML file of options, like max_model_len = 4096; tables only group. "
        "A flag wins over its environment variable, the variable over the file, the file over the default.",
        metavar="FILE",
    ),
)


# --- where values come from


def _from_flags(options: Mapping[str, Option], given: dict[str, Any]) -> dict[str, Setting]:
    """Take the options' parameters out of `given`, as Typer parsed them."""
    settings = {}
    for name, option in options.items():
        spelled = list(_spelled(option, given))
        if option.repeatable and spelled:
            settings[name] = Setting([each.value for each in spelled], option.flag)
        elif spelled:
            first = settings[name] = spelled[0]
            for other in spelled[1:]:
                if other.value != first.value:
                    raise typer.BadParameter(
                        f"given as {_word(first.value)} ({first.origin}) and as {_word(other.value)} ({other.origin})",
                        param_hint=option.flag,
                    )
    return settings


def _spelled(option: Option, given: dict[str, Any]) -> Iterator[Setting]:
    for flag in option.valued:
        for text in given.pop(_identifier(flag)) or ():
            yield Setting(option.convert(text), flag)
    for flag, value in option.constants.items():
        if given.pop(_identifier(flag)):
            yield Setting(value, flag)


def _from_environment(options: Mapping[str, Option], environ: Mapping[str, str]) -> dict[str, Setting]:
    """An empty variable counts as unset. A list is one value, or several as JSON."""
    settings = {}
    for name, option in options.items():
        if text := environ.get(option.env):
            value = _list(option, text) if option.repeatable else option.convert(text)
            settings[name] = Setting(value, option.env)
    return settings


def _list(option: Option, text: str) -> Any:
    if not text.startswith("["):
        return [option.convert(text)]
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = f"what starts with [ must be a JSON list, like {json.dumps([text])}; got {text!r}"
        raise typer.BadParameter(hint, param_hint=option.env) from error


def _from_file(paths: Sequence[Path] | None, options: Mapping[str, Option]) -> dict[str, Setting]:
    if not paths:
        return {}
    path, *others = paths
    if others:
        raise typer.BadParameter(f"one file only, not {len(paths)}", param_hint="--config")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the latter: not TOML, or not UTF-8
        reason = getattr(error, "strerror", None) or f"it is not TOML: {error}"
        raise typer.BadParameter(f"cannot read {path}: {reason}", param_hint="--config") from error
    settings = {}
    for key, value in _leaves(table, options):
        if key not in options:
            near = get_close_matches(key.replace("-", "_"), options, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise typer.BadParameter(f"{path} sets {key}, which is not an option here{hint}", param_hint="--config")
        if key in settings:
            raise typer.BadParameter(f"{path} sets {key} twice", param_hint="--config")
        settings[key] = Setting(value, f"{key} in {path}")
    return settings


def _leaves(table: Mapping[str, Any], options: Mapping[str, Option]) -> Iterator[tuple[str, Any]]:
    """The keys that are options; a table only groups, unless an option that is a map has its name."""
    for key, value in table.items():
        if key in options and options[key].key is not None:
            yield key, options[key].map(value)
        elif isinstance(value, dict):
            yield from _leaves(value, options)
        else:
            yield key, value


def _build(group: Any, settings: Mapping[str, Setting]) -> Any:
    """The dataclass of what was set; its ValueError, which begins with a field's name, becomes a usage error."""
    chosen = {f.name: settings[f.name] for f in dataclasses.fields(group) if f.name in settings}
    try:
        return group(**{name: setting.value for name, setting in chosen.items()})
    except ValueError as error:
        culprit = chosen.get(str(error).partition(" ")[0])
        raise typer.BadParameter(str(error), param_hint=culprit and culprit.origin) from error
