"""Reports of compilations for people: tables, pages, pictures, files. Nothing here decides anything."""

from collage_fx.report.dumps import *
from collage_fx.report.graphs import *
from collage_fx.report.plots import *
from collage_fx.report.report import *
from collage_fx.report.tensors import *
