"""Pipelines: text in, text out."""

from xformer.pipelines.tokenizers import Tokenizers
from xformer.pipelines.training import EncodedCorpus, ValidationBleu
from xformer.pipelines.translation import Translation, Translator, check_lengths

__all__ = ["EncodedCorpus", "Tokenizers", "Translation", "Translator", "ValidationBleu", "check_lengths"]
