r"""`xformer train-lm`: train a language model on plain text or chats.

Train a language model on plain text: a decoder-only Transformer that predicts each character, or token, from those
before it. Or fine-tune a model that answers chats.

Learns a vocabulary, trains, validates at regular intervals, and writes to DIR the best model (model.safetensors), the
last state (last.safetensors), the tokenizer, the configuration (config.json) and log.jsonl. All input is checked
before anything is written. The state is saved every few minutes and on Ctrl-C; `xformer resume DIR` continues from
it.

\b
Tiny Shakespeare (input.txt, 1.1 million characters), two minutes on two CPU cores:
  xformer train-lm --text input.txt --out run \
    --recipe docs/recipes/tinyshakespeare.toml
  xformer generate --model run --prompt "ROMEO:"
A text of your own, for 20 minutes (30 by default):
  xformer train-lm --text mine.txt --out run --max-minutes 20
Fine-tune a public checkpoint:
  xformer train-lm --text mine.txt --init SmolLM2-135M --out run
  xformer train-lm --text mine.txt --init SmolLM2-135M --lora 8 --out run
On chats, one JSON object per line ({"messages": [{"role": "user", "content": "..."}, ...]}):
  xformer train-lm --chats chats.jsonl --init SmolLM2-135M-Instruct --lora 8 --out run
  xformer generate --model run --chat --prompt "Hello"
Continue it, and train longer:
  xformer resume run --max-minutes 60

The last tenth of the text, or a tenth of the chats, drawn at random and at most 1,000, is held out for validation
(--valid-share), unless --valid-text or --valid-chats names other ones. The loss is in nats per token; perplexity is
its exponential. With chats it is that of the answers of the assistant. Several conversations share a row of
--context-length tokens (by default the longest conversation, from 192 to 1024), without seeing each other, and a batch
has 4 rows. Without --max-steps and --max-minutes, training ends after 30 minutes, or when 5 validations in turn are no
better (--patience).

\b
A recipe has task = "language_modeling" (or "chat") and three tables; options override it:
  \[model]      d_model, num_heads, d_ff, num_layers, positions, dropout, ...
  \[tokenizer]  model = "characters" | "bpe", vocab_size, ...
  \[training]   context_length, batch_size, learning_rate, schedule, optimizer, ...

With --init, training starts from a public checkpoint or a run, with its tokenizer. It ends after ten epochs, when two
validations in turn are no better, or after 30 minutes, unless --max-steps is set; the best model is kept. The learning
rate is then 5e-5 unless set (5e-4 with --lora), warm-up takes at most a tenth of --max-steps, and \[model] has only
dropout, attention_dropout, activation_dropout and rematerialize. `xformer export DIR OUT` writes the tuned model in
the Hugging Face format.

Uses all cores; XFORMER_NUM_THREADS=N limits the number of threads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from xformer.cli._options import OutOption, config_options, file_option, launch_arguments
from xformer.cli.train import COMPUTING, TRAINING, finish
from xformer.runs import launch
from xformer.runs.config import ChatTrainingConfig, InitConfig, LanguageModelTrainingConfig

_OPTIONS = ["lora", "context_length", "batch_size", "truncation", *TRAINING, *COMPUTING]
_VARIANTS = {"with --chats": ChatTrainingConfig}


@config_options(LanguageModelTrainingConfig, InitConfig, names=_OPTIONS, default_of="the recipe's", variants=_VARIANTS)
def train_lm(
    out: OutOption,
    text: Annotated[Path | None, file_option("--text", "Training text, used with its line ends.")] = None,
    valid_text: Annotated[Path | None, file_option("--valid-text", "Validation text.")] = None,
    chats: Annotated[Path | None, file_option("--chats", "Conversations, one JSON object per line.")] = None,
    valid_chats: Annotated[Path | None, file_option("--valid-chats", "Conversations for validation.")] = None,
    *,
    training: dict[str, Any],
    settings: dict[str, Any],
) -> int:
    """Train a language model on plain text or chats."""
    texts: dict[str, Any] = {"text": text, "valid_text": valid_text, "chats": chats, "valid_chats": valid_chats}
    return finish(launch.train_lm(**texts, out=out, **launch_arguments(settings, training)))
