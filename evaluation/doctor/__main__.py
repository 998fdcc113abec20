"""`python -m evaluation.doctor`, which is also `jetspecpp doctor`."""

import sys

from evaluation.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
