"""`python -m pmlf` is `pmlf`."""

import sys

from pmlf.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
