"""`python -m evaluation.bench`, which is also `jetspecpp bench`."""

import sys

from evaluation.bench.cli import configure_logging, main

if __name__ == "__main__":
    configure_logging()
    sys.exit(main())
