"""`python -m ds4v41` is `ds4v41`."""

import sys

from .cli import main

sys.exit(main())
