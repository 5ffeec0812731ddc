"""Test suites of other packages: where they come from, and how they are run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

__all__ = ["DTYPES", "SUITES", "Dtype", "Suite"]

ROOT = Path(__file__).resolve().parents[2]

#: Names of the dtypes that parameters get.
Dtype = Literal["float32", "bf16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bf16")


@dataclass(frozen=True)
class Suite:
    """One package's tests.

    Attributes:
        name: in tables and file names.
        package: the distribution's name on PyPI; its installed version is the one that is tested.
        tests: files or folders, relative to the root of the unpacked source.
        release: version of the source, if it is not that of the package.
        archive: address of an archive, for packages whose source distribution has no tests; ``{release}``
            stands in it for the version. None: the source distribution.
        members: prefixes of what is unpacked, below the archive's first folder.
        processes: for scripts: numbers of processes. Empty: ``tests`` are run by pytest.
        shipped: the tests are in the installed package, or in this repository; nothing is downloaded.
        judges: the tests install their optimizers themselves: nothing is done to these.
        cpu_for_cuda: ``.cuda()`` gives the tensor or module itself, where a suite knows no CPU.
        arguments: of pytest.
    """

    name: str
    package: str
    tests: Sequence[str]
    release: str | None = None
    archive: str | None = None
    members: Sequence[str] = ("",)
    processes: Sequence[int] = ()
    shipped: Path | None = None
    judges: bool = False
    cpu_for_cuda: bool = False
    arguments: Sequence[str] = ()

    @property
    def version(self) -> str:
        """Version of the source."""
        return self.release or version(self.package)

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Dtypes that the suite is run in; tests that judge choose dtypes themselves."""
        return ("bf16",) if self.judges else DTYPES


SUITES = (
    Suite("pytorch-optimizer", "pytorch_optimizer", ("tests",)),
    Suite("schedulefree", "schedulefree", ("schedulefree/test_schedulefree.py",), cpu_for_cuda=True),
    Suite(
        "heavyball",
        "heavyball",
        ("test",),
        release="3.2.0",
        archive="https://github.com/HomebrewML/HeavyBall/archive/refs/tags/v{release}.tar.gz",
        members=("test/", "scripts/"),
        cpu_for_cuda=True,
    ),
    Suite(
        "torchao",
        "torchao",
        ("test/test_low_bit_optim.py",),
        archive="https://github.com/pytorch/ao/archive/refs/tags/v{release}.tar.gz",
        members=("test/test_low_bit_optim.py",),
    ),
    Suite(
        "accelerate",
        "accelerate",
        tuple(
            f"accelerate/test_utils/scripts/{name}.py"
            for name in (
                "test_script",
                "test_sync",
                "test_ops",
                "test_distributed_data_loop",
                "test_merge_weights",
                "test_ddp_comm_hook",
                "external_deps/test_checkpointing",
                "external_deps/test_metrics",
                "external_deps/test_performance",
            )
        ),
        processes=(1, 2),
    ),
    Suite(
        "programs",
        "collage-fx",
        ("tests/peers/programs.py",),
        release="own",
        shipped=ROOT,
        judges=True,
        arguments=("-rP",),
    ),
)
