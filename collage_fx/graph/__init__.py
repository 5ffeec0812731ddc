"""A captured step as data, and the tools that edit it: all that the author of a pass needs to import."""

from collage_fx.graph.cancellation import *
from collage_fx.graph.devices import *
from collage_fx.graph.editor import *
from collage_fx.graph.families import *
from collage_fx.graph.feedback import *
from collage_fx.graph.invariants import *
from collage_fx.graph.new_tensors import *
from collage_fx.graph.nodes import *
from collage_fx.graph.operator_facts import *
from collage_fx.graph.operators import *
from collage_fx.graph.program import *
from collage_fx.graph.recurrence import *
from collage_fx.graph.retype import *
from collage_fx.graph.routes import *
from collage_fx.graph.signs import *
from collage_fx.graph.skipping import *
from collage_fx.graph.text import *
