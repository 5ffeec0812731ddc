"""Tool ``explain``, and doors for ``collage_tools``, which imports nothing else that is not public."""

from collage_fx.options import refuse_unknown
from collage_fx.report import try_updates
from collage_fx.state import SafetensorsFile, bytes_held, known_tensors
from collage_fx.tools.elsewhere import DeviceLaunch, launches_elsewhere
from collage_fx.torch_compat import (
    PATCHES,
    conversions,
    cpp_compilers,
    forget_counts,
    misfits,
    no_kernels_ahead,
    recompile_reasons,
)
