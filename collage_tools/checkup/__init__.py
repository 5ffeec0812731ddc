"""Tool ``checkup``: tell from the files of a checkpoint whether bf16 or fp16 has frozen its weights."""

from collage_tools.checkup.files import TORCH_ENDINGS, WEIGHTS_UNDER, load_plain
from collage_tools.checkup.verdicts import Checkup, checkup

__all__ = ["TORCH_ENDINGS", "WEIGHTS_UNDER", "Checkup", "checkup", "load_plain"]
