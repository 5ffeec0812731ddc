"""Reports: tables of the treatment of each tensor, and the graphs that ``collage_tools.pages`` draws."""

from collage_fx.report.dumps import PassLog
from collage_fx.report.graphs import GraphReport
from collage_fx.report.prediction import Updates, enough, try_updates, updates_of
from collage_fx.report.report import CollageReport
from collage_fx.report.tables import BUDGET_CAPTION, budget_table, plainly, summary_line
from collage_fx.report.tensors import TensorReport, Treatment, bytes_per_parameter, tensor_report, treatments
