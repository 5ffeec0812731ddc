"""``python -m collage_fx``: the command line."""

import sys

if __name__ == "__main__":
    from collage_tools.cli import main

    sys.exit(main())
