"""Every Python example of the documentation, run as it stands; those that need a server are in test_serve.py."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_model
ROOT = Path(__file__).parents[2]
EXAMPLES = [
    pytest.param(code, id=f"{name}-{number}")
    for name in ("README.md", "docs/api.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL))
    if "OpenAI(" not in code
]


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs_and_prints(code, capsys):
    exec(compile(code, "example", "exec"), {})
    assert capsys.readouterr().out.strip()
