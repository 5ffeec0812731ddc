"""The capture of a step: an accepted graph whose inputs have names, in families of equal updates."""

from collage_fx.capture.closures import *
from collage_fx.capture.families import *
from collage_fx.capture.foreach import *
from collage_fx.capture.inputs import *
from collage_fx.capture.members import *
from collage_fx.capture.new_state import *
from collage_fx.capture.numbers import *
from collage_fx.capture.progress import *
from collage_fx.capture.recorder import *
from collage_fx.capture.recording import *
from collage_fx.capture.refusals import *
from collage_fx.capture.thinning import *
from collage_fx.capture.watch import *
