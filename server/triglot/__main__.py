"""`python -m triglot`."""

import sys

from triglot.cli import main

if __name__ == "__main__":
    sys.exit(main())
