"""Tool ``plan``: memory of a training job, and its largest micro-batches, without allocating it."""

from collage_tools.plan.jobs import GB, plan
from collage_tools.plan.page import json_of, page_of, text_of
from collage_tools.plan.sources import from_file, from_hf

__all__ = ["GB", "from_file", "from_hf", "json_of", "page_of", "plan", "text_of"]
