"""`python -m ds4v41.cli` is `ds4v41`."""

import sys

from . import main

sys.exit(main())
