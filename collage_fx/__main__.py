"""``python -m collage_fx``: the command line."""

import sys

from collage_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
