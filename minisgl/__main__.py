"""`python -m minisgl` does what `minisgl` does."""

import sys

from minisgl_cli.main import main  # pyright: ignore[reportMissingImports]  # the installed name of cli/

if __name__ == "__main__":
    sys.exit(main())
