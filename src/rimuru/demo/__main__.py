"""`python -m rimuru.demo` is what `make demo` runs."""

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main())
