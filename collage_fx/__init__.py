"""collage_fx: a torch.compile backend that makes any PyTorch optimizer precise in pure low precision."""

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from collage_fx.torch_compat.first_use import at_first_use, is_used

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

#: Names of tools -> their modules, which are imported when a tool is first used.
_TOOLS = {name: f"collage_tools.{name}" for name in ("audit", "checkup", "gpu_code")}

if TYPE_CHECKING or is_used(__name__):  # Note [First use] in torch_compat/first_use.py
    from collage_fx import optim
    from collage_fx.backend import CollageBackend, backend_for, collage_backend
    from collage_fx.errors import CollageError
    from collage_fx.installation import backend_of, install, uninstall
    from collage_fx.report import CollageReport
    from collage_fx.state.checkpoint import plain_state_dict
    from collage_fx.state.error_terms import assign, error_terms, full_value, reset_error_terms
    from collage_fx.state.full_state import full_state_dict, load_full_state_dict, save_full_state_dict
    from collage_fx.state.replaced_state import move_state
    from collage_fx.tools.explain import explain
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

if TYPE_CHECKING:
    from collage_tools.audit import audit
    from collage_tools.checkup import checkup
    from collage_tools.gpu_code import gpu_code
else:  # for a type checker any name would be there
    _import_all = at_first_use(__name__)

    def __getattr__(name: str) -> Any:
        """Import a tool, or all other names."""
        if name not in _TOOLS:
            return _import_all(name)
        found = globals()[name] = getattr(importlib.import_module(_TOOLS[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


#: Function that imports all names now, as the first use of one does.
_complete = functools.partial(getattr, sys.modules[__name__], "install")


def _starts_command_line() -> bool:
    """Return whether Python starts ``collage-fx`` or ``python -m collage_fx``: its help needs no torch."""
    program = sys.argv[0].replace("\\", "/").rpartition("/")[2] if sys.argv else ""
    return program.partition(".")[0] == "collage-fx" or (program == "-m" and __name__ in sys.orig_argv)


def _packed_tensor(*saved: Any) -> Any:
    """Make a packed tensor of the contents of a file, for ``torch.load``."""
    return importlib.import_module("collage_fx.state.error_terms").packed_tensor(*saved)


def _act_early() -> None:
    """Set the hooks that have to act before a name is used: Note [First use]."""
    from torch.serialization import add_safe_globals

    from collage_fx.torch_compat.patch_steps import before_first_eager_step, install_averages
    from collage_fx.torch_compat.version import check_version

    check_version()
    install_averages()
    before_first_eager_step(_complete)
    rooms = "state", "runtime"  # the latter in files of earlier versions
    add_safe_globals([(_packed_tensor, f"collage_fx.{room}.error_terms.packed_tensor") for room in rooms])


if is_used(__name__) or not _starts_command_line():
    _act_early()
