"""Print how long the command line takes to start, and which imports take it: python scripts/startup.py"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = 7
HELP = "import sys; from cli.main import main; sys.exit(main(['--help']))"
CASES = {
    "python -c pass": "pass",
    "import minisgl": "import minisgl",
    "minisgl --help": HELP,
    "minisgl --version": HELP.replace("--help", "--version"),
    "import minisgl.llm (torch and all)": "import minisgl.llm",
}


def main() -> None:
    """Medians over several runs, then the imports of `minisgl --help` that take longest."""
    for name, code in CASES.items():
        seconds = statistics.median(start(code)[0] for _ in range(RUNS))
        print(f"{name:36} {seconds * 1e3:6.0f} ms")
    _, timings = start(HELP, "-X", "importtime")
    rows = [line.removeprefix("import time:").split("|") for line in timings.splitlines() if "|" in line]
    own = sorted(((int(own), name.strip()) for own, _, name in rows[1:]), reverse=True)
    print("\nslowest imports of minisgl --help, in themselves:")
    for microseconds, name in own[:10]:
        print(f"{name:36} {microseconds / 1e3:6.1f} ms")


def start(code: str, *options: str) -> tuple[float, str]:
    """Run code in a Python of its own; returns seconds and what it said on stderr."""
    began = time.perf_counter()
    result = subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return time.perf_counter() - began, result.stderr


if __name__ == "__main__":
    main()
