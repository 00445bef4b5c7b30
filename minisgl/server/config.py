"""What a user of the server can set, beside the engine's own options."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_doc import Doc

from minisgl.config import check_range, check_types


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Server

    Raises ValueError, naming the field, its value and what is allowed.
    """

    host: Annotated[str, Doc("Address to listen on; 0.0.0.0 for all, with an API key.")] = "127.0.0.1"
    port: Annotated[int, Doc("Port to listen on; 0 takes a free one.")] = 8000
    frontends: Annotated[int, Doc("Processes that share the port; each tokenizes and detokenizes on its own.")] = 1
    api_key: Annotated[
        str | Sequence[str] | None, Doc("Key that clients must send as a bearer token; may be given several times.")
    ] = None
    served_model_name: Annotated[
        str | Sequence[str] | None,
        Doc("Name of the model in requests and answers; may be given several times, the first is shown."),
    ] = None
    chat_template: Annotated[str | None, Doc("File with a Jinja chat template, in place of the model's.")] = None
    default_chat_template_kwargs: Annotated[
        str | None, Doc("JSON object of variables that every chat template gets, unless a request sets them.")
    ] = None
    max_queued_requests: Annotated[
        int, Doc("Most requests that wait for the engine; what comes beyond is answered 503.")
    ] = 4096
    request_timeout: Annotated[
        float | None, Doc("Seconds after which a request is ended with an error; default: never.")
    ] = None
    drain_timeout: Annotated[float, Doc("Seconds that running requests have to end when the server is stopped.")] = 30.0
    watchdog_timeout: Annotated[
        float, Doc("Seconds without a finished step after which the engine counts as hung.")
    ] = 300.0
    max_body_mb: Annotated[float, Doc("Largest request body in MB.")] = 32.0
    allowed_origins: Annotated[
        str | Sequence[str] | None,
        Doc("Origin that browsers may call from (CORS), * for any; may be given several times."),
    ] = None
    log_requests: Annotated[bool, Doc("Log a line for every request.")] = False
    log_interval: Annotated[float, Doc("Seconds between lines about the load while there is traffic; 0: none.")] = 5.0

    def __post_init__(self) -> None:
        check_types(self)
        check_range("port", self.port, least=0, most=65_535)
        check_range("frontends", self.frontends, least=1, most=64)
        check_range("max_queued_requests", self.max_queued_requests, least=1, most=1_000_000)
        check_range("drain_timeout", self.drain_timeout, least=0, most=86_400)
        check_range("log_interval", self.log_interval, least=0, most=86_400)
        check_range("watchdog_timeout", self.watchdog_timeout, least=5, most=86_400)  # it beats once a second or two
        for name in ("request_timeout", "max_body_mb"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 86_400:
                raise ValueError(f"{name} must be above 0 and at most 86400, got {value}")
        for name in ("api_key", "served_model_name", "allowed_origins"):
            value = getattr(self, name)
            texts = (value,) if isinstance(value, str) else tuple(value or ())
            if "" in texts:
                raise ValueError(f"{name} must not be an empty text")
            object.__setattr__(self, name, texts or None)
