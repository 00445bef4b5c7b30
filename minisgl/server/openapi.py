"""The server's description in OpenAPI, made from the tables that requests are read by and the routes themselves."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_origin

from aiohttp import web
from annotated_doc import Doc

from minisgl import __version__
from minisgl.config import SamplingParams, alternatives
from minisgl.openai.protocol import NEUTRAL, OWN, REQUIRED, ROUTES, SAMPLING, STREAM, WITHOUT_EFFECT, Schema

_NULL: Schema = {"type": "null"}
_NAMES: Mapping[Any, str] = {bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}}
            | dict.fromkeys(("param", "code"), _TEXT_OR_NULL),
        }
    },
}


def openapi(routes: Sequence[web.RouteDef]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = re.sub(r":[^}]*", "", route.path)
        operation: dict[str, Any] = {
            "summary": route.handler.__doc__,
            "responses": {
                "200": {"description": "The answer."},
                "default": {"description": "An error."} | _json(_ERROR),
            },
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in re.findall(r"{(\w+)}", path)
            ],
        }
        if path in OWN:
            operation["requestBody"] = {"required": True} | _json(_body(path))
        paths.setdefault(path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _json(schema: Schema) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _body(route: str) -> Schema:
    """What a request's body may hold: every field that is read, and null for each of them."""
    properties = {name: _or_null(schema) for name, schema in OWN[route].items()}
    if route in ROUTES:
        properties |= {name: {"description": "Without effect."} for name in WITHOUT_EFFECT}
        properties |= {
            name: {"enum": [*values, None], "description": "Only at a value without effect."}
            for name, values in NEUTRAL[route].items()
        }
        properties |= {name: _or_null(schema) for name, schema in STREAM.items()}
        properties |= {f.name: _sampling(f.type) for f in fields(SamplingParams) if f.name in SAMPLING}
    return {
        "type": "object",
        "properties": dict(sorted(properties.items())),
        "required": REQUIRED[route],
        "additionalProperties": False,
    }


def _sampling(hint: Any) -> Schema:
    """The schema of a field of `SamplingParams`, which may be unset."""
    kind, *notes = get_args(hint)
    (doc,) = (note.documentation for note in notes if isinstance(note, Doc))
    return {"anyOf": [_kind(each) for each in alternatives(kind)], "description": doc}


def _kind(kind: Any) -> Schema:
    if get_origin(kind) is Sequence:
        return {"type": "array", "items": _kind(get_args(kind)[0])}
    return {"type": _NAMES[kind]}


def _or_null(schema: Schema) -> Schema:
    shape = {name: value for name, value in schema.items() if name != "description"}
    return {"anyOf": [shape, _NULL], "description": schema["description"]}
