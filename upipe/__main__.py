"""`python -m upipe` is the `upipe` command."""

import sys

from upipe.cli import main

sys.exit(main())
