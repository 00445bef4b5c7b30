"""What a trace says of itself, beside what ran: of which engine it is, on what, and what its steps were."""

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from minisgl.bench.ceilings import ceilings
from minisgl.bench.record import Ceilings, versions
from minisgl.config import EngineConfig
from minisgl.doctor.machine import device_name
from minisgl.source.model_config import ModelConfig, read_model_config

SETTLING = 3
"""Steps that are captured and not counted: the first ones bear what profiling costs when it begins."""


class Step(Struct, kw_only=True):
    """What the host knew of a step when it launched it."""

    tokens: int  # computed
    decode_rows: int
    decode_context: int  # tokens whose keys and values the rows that decode read
    prompts: list[tuple[int, int]]  # of each row that prefills: tokens with KV after the step, and before
    samples: int  # tokens drawn
    graph_tokens: int = 0  # that CUDA graphs computed, with those that fill them up; 0: there was none

    @property
    def phase(self) -> str:
        """What kinds of rows it has."""
        if not self.decode_rows:
            return "prefill"
        return "mixed" if self.prompts else "decode"


class Facts(Struct):
    """Of a trace."""

    model: str
    device: str
    versions: dict[str, str]
    engine: EngineConfig  # with nothing left at auto
    shape: ModelConfig
    ceilings: Ceilings | None  # of one of its devices
    no_ceilings: str = ""  # why there are none
    plain_step_us: float | None = None  # what a step takes while nothing is captured, where that is known
    settling: int = SETTLING
    steps: list[Step] = []


def engine_facts(model: str, folder: str, engine: EngineConfig, say: Callable[[str], None] | None = None) -> Facts:
    """Of an engine with these options and the model in that folder.

    Ceilings that are not known yet are measured where there is a `say` to be told.
    """
    device, found, why = device_name(engine.device), None, ""
    try:
        found = ceilings(device, engine.device, engine.dtype, say)
    except (ValueError, OSError) as error:
        why = str(error)
    shape = read_model_config(Path(folder), warn=False)
    return Facts(model, device, versions(), engine, shape, found, why)
