"""Tool ``plan``: memory of a training job, and its largest micro-batches, without allocating it."""

from collage_tools.plan.jobs import Plan
from collage_tools.plan.page import json_of, page_of, shortage_of, text_of
from collage_tools.plan.sources import from_file, from_hf

__all__ = ["Plan", "from_file", "from_hf", "json_of", "page_of", "shortage_of", "text_of"]
