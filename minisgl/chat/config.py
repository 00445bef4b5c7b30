"""What a user of the shell can set, beside the engine's own options."""

from dataclasses import dataclass
from typing import Annotated

from annotated_doc import Doc

from minisgl.config import check_types


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Chat

    Raises ValueError, naming the field, its value and what is allowed.
    """

    url: Annotated[str | None, Doc("An OpenAI-compatible server to talk to; default: an engine of its own.")] = None
    api_key: Annotated[str | None, Doc("Key that the server at url asks for.")] = None
    system: Annotated[str | None, Doc("System message to begin with.")] = None
    load: Annotated[str | None, Doc("File with a saved conversation to go on with.")] = None
    history: Annotated[bool, Doc("Keep what was entered for later chats.")] = True

    def __post_init__(self) -> None:
        check_types(self)
