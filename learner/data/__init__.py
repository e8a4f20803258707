"""Data sets of prompts: reading, validation, prompt ids, chat template and tokenisation. No torch."""

from learner.data.dataset import LeftOut, Prompt, PromptSet, load_prompts
from learner.data.report import DataReport, check_file

__all__ = ["DataReport", "LeftOut", "Prompt", "PromptSet", "check_file", "load_prompts"]
