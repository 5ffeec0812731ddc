"""collage_fx: a torch.compile backend that makes any PyTorch optimizer precise in pure low precision."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collage_tools.checkup import checkup
    from collage_tools.gpu_code import gpu_code

_is_reloaded = "_complete" in vars()

__version__ = "0.1.0"

__all__ = [
    "CollageBackend",
    "CollageError",
    "CollageReport",
    "Conversion",
    "FullPrecisionForward",
    "GradientRelease",
    "Offload",
    "WeightChanges",
    "WeightPatch",
    "apply_changes",
    "assign",
    "audit",
    "backend_for",
    "backend_of",
    "changes",
    "checkup",
    "collage_backend",
    "convert",
    "error_terms",
    "explain",
    "forget_changes",
    "full_precision_forward",
    "full_state_dict",
    "full_value",
    "gpu_code",
    "install",
    "load_changes",
    "load_full_state_dict",
    "move_state",
    "offload",
    "optim",
    "plain_state_dict",
    "reset_error_terms",
    "save_changes",
    "save_full_state_dict",
    "step_in_backward",
    "uninstall",
]

#: Names that are imported when they are first used, and their modules.
_AT_FIRST_USE = {"checkup": "collage_tools.checkup", "gpu_code": "collage_tools.gpu_code"}


if not TYPE_CHECKING:  # for which any name would be there

    def __getattr__(name: str) -> Any:
        """Import a name of a tool."""
        if name not in _AT_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_AT_FIRST_USE[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_AT_FIRST_USE})


def _starts_command_line() -> bool:
    """Return whether Python starts ``collage-fx`` or ``python -m collage_fx``: its help needs no torch."""
    program = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    return program.partition(".")[0] == "collage-fx" or (program == "-m" and __name__ in sys.orig_argv)


def _complete() -> None:
    """Import everything below, in the command line when a command runs; other programs do at once."""
    if "CollageBackend" not in globals():
        importlib.reload(sys.modules[__name__])


if _is_reloaded or not _starts_command_line():
    from collage_fx import optim
    from collage_fx.backend import CollageBackend, backend_for, collage_backend
    from collage_fx.errors import CollageError
    from collage_fx.install import backend_of, install, uninstall
    from collage_fx.report import CollageReport
    from collage_fx.state.checkpoint import install as _install_checkpoint_support
    from collage_fx.state.checkpoint import plain_state_dict
    from collage_fx.state.error_terms import assign, error_terms, full_value, reset_error_terms
    from collage_fx.state.full_state import full_state_dict, load_full_state_dict, save_full_state_dict
    from collage_fx.state.replaced_state import move_state
    from collage_fx.state.replaced_state import wrap_module_loading as _wrap_module_loading
    from collage_fx.tools.audit import audit
    from collage_fx.tools.explain import explain
    from collage_fx.torch_compat.patch_averages import install as _install_averaging_support
    from collage_fx.wings.conversion import Conversion, convert
    from collage_fx.wings.full_precision import FullPrecisionForward, full_precision_forward
    from collage_fx.wings.gradient_release import GradientRelease, step_in_backward
    from collage_fx.wings.offload import Offload, offload
    from collage_fx.wings.weight_changes import (
        WeightChanges,
        WeightPatch,
        apply_changes,
        changes,
        forget_changes,
        load_changes,
        save_changes,
    )

    _install_checkpoint_support()
    _wrap_module_loading()
    _install_averaging_support()
