"""Reports of compilations: tables, pages, pictures, plots and dumps. Nothing here decides anything."""

from collage_fx.report.dumps import PassLog
from collage_fx.report.graphs import GraphReport
from collage_fx.report.page import html_document, html_table
from collage_fx.report.plots import plot
from collage_fx.report.report import CollageReport
from collage_fx.report.svg import histogram
from collage_fx.report.tensors import TensorReport, tensor_report, treatments
