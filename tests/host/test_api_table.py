import dataclasses
import re
from pathlib import Path

import pytest

from minisgl.config import SamplingParams
from minisgl.openai.protocol import CHAT, COMPLETIONS, NEUTRAL, OWN, SAMPLING, STREAM, WITHOUT_EFFECT

API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_sampling_parameter_is_documented():
    table = API.split("## Sampling parameters")[1].split("\n# ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(f.name for f in dataclasses.fields(SamplingParams))


@pytest.mark.parametrize(("route", "column"), [(CHAT, 2), (COMPLETIONS, 3)])
def test_every_field_of_a_request_is_documented_as_it_is_treated(route: str, column: int):
    """Another field is refused, as the tables of the two routes say of each other's."""
    table = API.split("## Fields")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| `")]
    found = {name: row[column].split()[0] for row in rows for name in re.findall(r"`(\w+)`", row[1])}
    treated = dict.fromkeys(NEUTRAL[route], "only") | dict.fromkeys(WITHOUT_EFFECT, "without")
    treated |= dict.fromkeys({*SAMPLING, *OWN[route], *STREAM}, "supported")
    treated |= {"messages" if route == CHAT else "prompt": "required"}
    assert {name: word for name, word in found.items() if word != "refused"} == treated
    assert len(found) == sum(row[1].count("`") for row in rows) / 2
