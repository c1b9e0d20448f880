"""`python -m stoker.runs.report DIR`."""

import sys

from stoker.runs.report import main

sys.exit(main(sys.argv[1:]))
