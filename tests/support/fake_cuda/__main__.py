"""``python3 -m tests.support.fake_cuda FOLDER COMMAND...``: run a command with the card that is not there."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.support.fake_cuda.environment import NEWEST, VERSIONS, Environment, version


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m tests.support.fake_cuda", description=__doc__)
    parser.add_argument("--torch", default=NEWEST, help=f"{' or '.join(VERSIONS)}; {NEWEST} if not given")
    parser.add_argument("folder", type=Path, help="the environment, made the first time")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="none: only make the environment")
    given = parser.parse_args()
    try:
        environment = Environment(given.folder.resolve(), version(given.torch))
    except ValueError as error:
        parser.error(str(error))
    environment.set_up(os.environ.get("CXX", "g++"))
    return environment.run(*given.command) if given.command else 0


if __name__ == "__main__":
    sys.exit(main())
