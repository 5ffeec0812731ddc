"""Tool ``checkup``: tell from the files of a checkpoint whether bf16 or fp16 has frozen its weights."""

from collage_tools.checkup.verdicts import Checkup, checkup

__all__ = ["Checkup", "checkup"]
