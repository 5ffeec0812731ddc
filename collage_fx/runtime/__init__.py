"""The objects that outlive a compilation: all that runs at every step, or between steps."""

from collage_fx.runtime.batches import *
from collage_fx.runtime.calls import *
from collage_fx.runtime.checkpoint import *
from collage_fx.runtime.error_terms import *
from collage_fx.runtime.launches import *
from collage_fx.runtime.layouts import *
from collage_fx.runtime.meter import *
from collage_fx.runtime.metrics import *
from collage_fx.runtime.optimizers import *
from collage_fx.runtime.packed import *
from collage_fx.runtime.replaced_state import *
from collage_fx.runtime.step import *
