"""Public checkpoints in the Hugging Face format, read and written by one table for each family."""

from xformer.families.bart import BART
from xformer.families.bert import BERT, DISTILBERT, ROBERTA
from xformer.families.checkpoint import load_pretrained, save_pretrained
from xformer.families.cohere import COHERE
from xformer.families.dinov2 import DINOV2
from xformer.families.ernie import ERNIE
from xformer.families.family import FAMILIES, Family, family_of, register
from xformer.families.gemma import GEMMA
from xformer.families.glm import GLM
from xformer.families.gpt2 import GPT2
from xformer.families.gpt_neox import GPT_NEOX
from xformer.families.llama import LLAMA, PHI3
from xformer.families.olmo import OLMO
from xformer.families.opt import OPT
from xformer.families.peft import load_lora, save_lora
from xformer.families.phi import PHI
from xformer.families.stablelm import STABLELM
from xformer.families.starcoder2 import STARCODER2
from xformer.families.t5 import T5
from xformer.families.vit import VIT
from xformer.families.whisper import WHISPER

__all__ = [
    "BART",
    "BERT",
    "COHERE",
    "DINOV2",
    "DISTILBERT",
    "ERNIE",
    "FAMILIES",
    "GEMMA",
    "GLM",
    "GPT2",
    "GPT_NEOX",
    "LLAMA",
    "OLMO",
    "OPT",
    "PHI",
    "PHI3",
    "ROBERTA",
    "STABLELM",
    "STARCODER2",
    "T5",
    "VIT",
    "WHISPER",
    "Family",
    "family_of",
    "load_lora",
    "load_pretrained",
    "register",
    "save_lora",
    "save_pretrained",
]
