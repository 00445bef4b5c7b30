import dataclasses
import re
from pathlib import Path

from minisgl.config import SamplingParams


def test_every_sampling_parameter_is_documented():
    table = (Path(__file__).parents[2] / "docs" / "api.md").read_text().split("## Sampling parameters")[1]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(f.name for f in dataclasses.fields(SamplingParams))
