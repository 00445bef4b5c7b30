"""The budget that keeps minisgl readable, in lines without blanks, comments and docstrings."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = {
    "core": 3845,
    "kernels": 775,
    "source and tokenizer": 1800,
    "server": 2000,
    "openai": 800,
    "parallel": 665,
    "bench": 2110,
    "profiling": 900,
    "doctor": 320,
    "chat": 800,
    "cli": 800,
}
LONGEST_MODULE = 400
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code: a string that is a statement of its own is documentation."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            assert node.end_lineno
            lines -= set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def sizes() -> dict[str, int]:
    """Module → lines of code."""
    files = sorted([*ROOT.glob("minisgl/**/*.py"), *ROOT.glob("cli/**/*.py")])
    return {str(file.relative_to(ROOT)): code_lines(file.read_text()) for file in files}


def part_of(module: str) -> str:
    """The part of the budget that a module counts to."""
    folder = module.removeprefix("minisgl/").partition("/")[0]
    return next((part for part in BUDGET if folder in part.split()), "core")


def test_each_part_stays_within_its_budget(capsys: pytest.CaptureFixture[str]):
    totals = dict.fromkeys(BUDGET, 0)
    for module, lines in sizes().items():
        totals[part_of(module)] += lines
    with capsys.disabled():
        print("\nlines of code:", ", ".join(f"{part} {totals[part]} of {most}" for part, most in BUDGET.items()))
    assert {part: total for part, total in totals.items() if total > BUDGET[part]} == {}


def test_no_module_is_too_long_to_read():
    assert {module: lines for module, lines in sizes().items() if lines > LONGEST_MODULE} == {}


def test_blanks_comments_and_docstrings_do_not_count():
    top = '"""Doc\n\nstring."""\n\nX = 1  # one\n"""About X."""\n# comment\n\n'
    source = top + 'def f():\n    "Doc"\n    return """a\nb"""\n'
    assert code_lines(source) == 4
