"""`python -m evaluation`, which is also `jetspecpp eval`."""

import sys

from evaluation.cli import main

sys.exit(main())
