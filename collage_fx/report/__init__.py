"""Reports of compilations for people: tables, pages, pictures, files. Nothing here decides anything."""

from collage_fx.report.dumps import is_dumping, open_dump
from collage_fx.report.graphs import GraphReport, Rewritten
from collage_fx.report.plots import plot
from collage_fx.report.report import CollageReport
from collage_fx.report.tensors import TensorReport, tensor_report, treatments

__all__ = [
    "CollageReport",
    "GraphReport",
    "Rewritten",
    "TensorReport",
    "is_dumping",
    "open_dump",
    "plot",
    "tensor_report",
    "treatments",
]
