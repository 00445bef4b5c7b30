"""What holds for every request: an id, who may ask, errors in one shape, a line in the log."""

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from aiohttp import web

from minisgl.openai.answers import error_body, new_id
from minisgl.openai.protocol import RequestError
from minisgl.server.config import ServerConfig
from minisgl.server.routes import NOTES, as_refusal

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_TO_ALL = frozenset({"/health"})
"""What is answered without a key."""

RETRY_S = 1
"""When to ask again what was refused for now."""

_ID = re.compile(r"[!-~]{1,128}")


class Guard:
    """Stands before all routes of an application; counts what they are at work on."""

    def __init__(self, config: ServerConfig) -> None:
        self.open = 0
        """Requests without a whole answer."""
        self._config = config
        self._keys = [_digest(key) for key in config.api_key or ()]  # all of one length, which a comparison may tell
        self._origins = frozenset(config.allowed_origins or ())

    def application(self, routes: Sequence[web.RouteDef]) -> web.Application:
        """The application with these routes behind it."""
        app = web.Application(middlewares=[self._enter], client_max_size=int(self._config.max_body_mb * 1_000_000))
        app.add_routes(routes)
        app.on_response_prepare.append(self._add_headers)
        return app

    @web.middleware
    async def _enter(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        asked_id = request.headers.get("X-Request-Id", "")
        notes = request[NOTES] = {"id": asked_id if _ID.fullmatch(asked_id) else new_id("req_")}
        began_s, status = time.monotonic(), 499  # as nginx says that the client has gone
        self.open += 1
        try:
            response = await self._answer(request, handler)
            status = response.status
            return response
        finally:
            self.open -= 1
            if self._config.log_requests:
                rest = " ".join(f"{name}={value}" for name, value in notes.items())
                seconds = time.monotonic() - began_s
                logger.info("%s %.200s %d %.3f s %s", request.method, request.rel_url.raw_path, status, seconds, rest)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.method == "OPTIONS" and self._allowed_origin(request) is not None:
                return web.Response(status=204)
            if self._keys and request.path not in OPEN_TO_ALL:
                self._check_key(request)
            response = await handler(request)
            await response.prepare(request)
            await response.write_eof()  # here: until it is sent, the request counts as open
            return response
        except web.HTTPException as error:
            refused, headers = self._as_refusal(request, error), error.headers
            more = {"Allow": headers["Allow"]} if "Allow" in headers else {}
        except web.RequestPayloadError as error:
            refused, more = RequestError(f"the body cannot be read: {' '.join(str(error).split())}"), {}
        except ConnectionError:  # the client has gone, as aiohttp is about to say in the same way
            raise asyncio.CancelledError from None
        except Exception as error:
            refused, more = as_refusal(error), {}
        request[NOTES]["error"] = repr(str(refused))
        if refused.status == 401:
            more = {"WWW-Authenticate": "Bearer"}
        if refused.status == 503:
            more = {"Retry-After": str(RETRY_S)}
        return web.Response(
            body=msgspec.json.encode(error_body(refused)),
            status=refused.status,
            content_type="application/json",
            headers=more,
        )

    def _check_key(self, request: web.Request) -> None:
        """Raise RequestError unless one of the keys is given; takes the same time for each that is not."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = [hmac.compare_digest(_digest(given.strip()), key) for key in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise RequestError(
                "this server needs a key, as the header 'Authorization: Bearer KEY', and got "
                + ("another one" if given else "none"),
                code="invalid_api_key",
                status=401,
            )

    def _as_refusal(self, request: web.Request, error: web.HTTPException) -> RequestError:
        """What aiohttp refuses, in the terms of the API."""
        says = {
            404: f"there is no {request.rel_url.raw_path:.200}: see /openapi.json for what there is",
            405: f"{request.method} is not for {request.path}, but {error.headers.get('Allow')}",
            413: f"the body is larger than --max-body-mb, {self._config.max_body_mb:g} MB",
        }
        return RequestError(says.get(error.status, error.reason), status=error.status)

    def _allowed_origin(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins & {"*", origin}:
            return None
        return "*" if "*" in self._origins else origin

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "minisgl"
        if self._origins and "*" not in self._origins:
            response.headers["Vary"] = "Origin"
        if notes := request.get(NOTES):
            response.headers["X-Request-Id"] = notes["id"]
        if (origin := self._allowed_origin(request)) is None:
            return
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
        if request.method == "OPTIONS":
            response.headers["Access-Control-Allow-Methods"] = "GET, POST"
            response.headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", "authorization, content-type"
            )
            response.headers["Access-Control-Max-Age"] = "600"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
