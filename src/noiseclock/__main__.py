"""`python -m noiseclock` is the command `noiseclock`."""

import sys

from noiseclock.cli import main

sys.exit(main())
