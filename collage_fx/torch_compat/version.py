"""Known versions of torch: uses no private names, so that it can report what is wrong."""

from __future__ import annotations

import torch

OLDEST_TORCH = (2, 11)
TESTED_TORCH = ("2.11", "2.13", "2.15")


def version() -> tuple[int, int]:
    """Return the major and minor number of torch's version."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def check_version() -> None:
    """Raise ImportError if torch is too old."""
    if version() < OLDEST_TORCH:
        raise ImportError(
            f"collage_fx needs torch >= {'.'.join(map(str, OLDEST_TORCH))}, found {torch.__version__}: "
            "AOTAutograd's input descriptors and the Inductor entry points it is built on are missing there"
        )


#: Remedy for an unknown version of torch.
OTHER_VERSIONS = f"install torch {', '.join(TESTED_TORCH)}, which are tested, or a newer collage_fx"


def unknown_version(told: object) -> ImportError:
    """Make the error for a torch that lacks a private name that is imported."""
    return ImportError(f"collage_fx does not know torch {torch.__version__}: {told}. Please {OTHER_VERSIONS}")
