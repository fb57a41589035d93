"""Public checkpoints in the Hugging Face format, read and written by one table for each family."""

from xformer.families.albert import ALBERT
from xformer.families.arcee import ARCEE
from xformer.families.bart import BART
from xformer.families.bert import BERT, CAMEMBERT, DISTILBERT, ROBERTA, XLM_ROBERTA
from xformer.families.bloom import BLOOM
from xformer.families.checkpoint import load_pretrained, save_pretrained
from xformer.families.clip import CLIP, SIGLIP
from xformer.families.cohere import COHERE
from xformer.families.deberta import DEBERTA_V2
from xformer.families.dinov2 import DINOV2
from xformer.families.electra import ELECTRA
from xformer.families.ernie import ERNIE
from xformer.families.falcon import FALCON
from xformer.families.family import FAMILIES, Family, family_of, register
from xformer.families.gemma import GEMMA
from xformer.families.glm import GLM
from xformer.families.gpt2 import GPT2
from xformer.families.gpt_neox import GPT_NEOX
from xformer.families.gpt_oss import GPT_OSS
from xformer.families.helium import HELIUM
from xformer.families.llama import LLAMA, PHI3
from xformer.families.mixtral import MIXTRAL
from xformer.families.modernbert import MODERNBERT
from xformer.families.mpnet import MPNET
from xformer.families.nemotron import NEMOTRON
from xformer.families.olmo import OLMO
from xformer.families.opt import OPT
from xformer.families.peft import load_lora, save_lora
from xformer.families.phi import PHI
from xformer.families.stablelm import STABLELM
from xformer.families.starcoder2 import STARCODER2
from xformer.families.t5 import T5
from xformer.families.t5gemma import T5GEMMA
from xformer.families.vit import VIT
from xformer.families.whisper import WHISPER

__all__ = [
    "ALBERT",
    "ARCEE",
    "BART",
    "BERT",
    "BLOOM",
    "CAMEMBERT",
    "CLIP",
    "COHERE",
    "DEBERTA_V2",
    "DINOV2",
    "DISTILBERT",
    "ELECTRA",
    "ERNIE",
    "FALCON",
    "FAMILIES",
    "GEMMA",
    "GLM",
    "GPT2",
    "GPT_NEOX",
    "GPT_OSS",
    "HELIUM",
    "LLAMA",
    "MIXTRAL",
    "MODERNBERT",
    "MPNET",
    "NEMOTRON",
    "OLMO",
    "OPT",
    "PHI",
    "PHI3",
    "ROBERTA",
    "SIGLIP",
    "STABLELM",
    "STARCODER2",
    "T5",
    "T5GEMMA",
    "VIT",
    "WHISPER",
    "XLM_ROBERTA",
    "Family",
    "family_of",
    "load_lora",
    "load_pretrained",
    "register",
    "save_lora",
    "save_pretrained",
]
