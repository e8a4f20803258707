"""Data sets of prompts: reading, validation, prompt ids, chat template and tokenisation. No torch."""

from learner.data.dataset import LeftOut, Prompt, PromptSet, load_prompts
from learner.data.report import DataReport, check_files

__all__ = ["DataReport", "LeftOut", "Prompt", "PromptSet", "check_files", "load_prompts"]
