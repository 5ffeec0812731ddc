"""Compare the CPU time of imports with that of ``import torch``: ``python -m benchmarks.importing``.

The least of some fresh processes, which alternate.
"""

from __future__ import annotations

import os
import subprocess
import sys

IMPORTS = ("import torch", "import collage_fx", "from collage_fx import install")


def timed(program: str) -> float:
    """Return the seconds on the cores that a fresh process takes."""
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def main() -> None:
    rounds = [{program: timed(program) for program in IMPORTS} for _ in range(5)]
    seconds = {program: min(each[program] for each in rounds) for program in IMPORTS}
    for program, each in seconds.items():
        print(f"{program:32} {each:5.2f} s, {each / seconds['import torch']:.2f} of import torch")


if __name__ == "__main__":
    main()
