"""Reports as pages, pictures and plots."""

from collage_tools.pages.page import bars, html_document, html_page, html_table
from collage_tools.pages.pictures import Picture, picture, whole_graph
from collage_tools.pages.plots import COLOURS, plot
from collage_tools.pages.svg import histogram, svg

__all__ = [
    "COLOURS",
    "Picture",
    "bars",
    "histogram",
    "html_document",
    "html_page",
    "html_table",
    "picture",
    "plot",
    "svg",
    "whole_graph",
]
