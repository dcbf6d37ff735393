"""`python -m lmeval_prune`."""

import sys

from lmeval_prune.cli import main

sys.exit(main())
