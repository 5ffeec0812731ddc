"""Tools for people, and doors for ``collage_tools``, which imports nothing else that is not public."""

from collage_fx.state import SafetensorsFile
from collage_fx.tools.doctor import examine, patches
from collage_fx.tools.elsewhere import DeviceLaunch, launches_elsewhere
from collage_fx.torch_compat import no_kernels_ahead
