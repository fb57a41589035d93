r"""`xformer export`: write the model of a run in the format of another library.

Write the best model of a run, and its tokenizer, in the format of another library.

\b
  xformer export run checkpoint
  xformer translate --model checkpoint --input test.de
  xformer export run adapters --format peft
  xformer export run onnx --format onnx
  xformer export run ct2 --format ctranslate2 --quantization int8
  xformer export run page --format web
  xformer export SmolLM2-135M-Instruct.gguf checkpoint
  xformer export run model.gguf --format gguf
  xformer export SmolLM2-135M-Instruct small.gguf --format gguf --quantization Q4_K
  xformer export run adapter.gguf --format gguf-lora
  xformer export adapters adapter.gguf --format gguf --base SmolLM2-135M-Instruct

huggingface: a directory for transformers and other programs. Translators and summarizers become Pegasus models, or
Marian models with post-norm; language models become Llama, GPT-NeoX or GPT-2 models. If no family computes the
same, the error names the nearest one and the fields of the configuration that differ. A run that started from a
public checkpoint (--init) is written in the format of that checkpoint. RUN may also be a public checkpoint that
generates text, such as a GGUF file.

peft: the adapters of a run with --lora, as adapter_config.json and adapter_model.safetensors for peft.PeftModel.

gguf: a file for llama.cpp, with the tokenizer and the chat template. The matrices are in F32, F16, BF16, Q8_0, Q4_0,
Q4_1, Q5_0, Q5_1, Q4_K, Q5_K or Q6_K; by default in the types of the GGUF file that the run started from, or of the
checkpoint. Adapters are merged. RUN may also be a public checkpoint, such as a GGUF file. gguf-lora: the adapters of a
run with --lora, for llama-cli --lora; with both formats, RUN may be a directory of PEFT (adapter_config.json), whose
adapters are written. docs/how-to/export-gguf.md has examples.

onnx: encoder.onnx, decoder.onnx and step.onnx, or model.onnx and step.onnx for language models, for onnxruntime and
the browser. RUN may also be a public checkpoint. Needs the extra "onnx". docs/how-to/export-onnx.md has a decoding
loop.

ctranslate2: model.bin for ctranslate2.Translator or ctranslate2.Generator, with the weights in float32, int8, int16,
float16 or bfloat16. RUN may also be a public checkpoint. Needs the extra "ctranslate2".
docs/how-to/export-ctranslate2.md has an example.

web: a page that generates text in the browser and shows attention, alternatives and what each layer would predict;
any static host serves it. RUN may also be a public checkpoint. Needs the extra "onnx" and two npm packages:
npm install onnxruntime-web @huggingface/tokenizers. docs/how-to/export-web.md describes the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from xformer.cli._io import percent_progress
from xformer.cli._options import argument, value_option
from xformer.errors import check_choice
from xformer.pipelines.export import FORMATS, export_run
from xformer.runs.console import make_console

_TYPE_HELP = "Type of the weights: float32 or int8 for onnx and web (default int8); others for ctranslate2 and gguf."
_BASE_HELP = "Checkpoint to which adapters of PEFT belong; default what adapter_config.json names."
_RUNTIME_HELP = "Directory in which the npm packages of web are installed; default the current one."


def export(
    directory: Annotated[Path, argument("RUN", "Directory of the run, or a public checkpoint.")],
    output: Annotated[Path, argument("OUT", "New directory to write; a file for gguf.")],
    target: Annotated[str, value_option("--format", "NAME", f"Format: {', '.join(FORMATS)}.", None)] = "huggingface",
    quantization: Annotated[str | None, value_option("--quantization", "TYPE", _TYPE_HELP, None)] = None,
    runtime: Annotated[Path | None, value_option("--runtime", "DIR", _RUNTIME_HELP, None)] = None,
    base: Annotated[Path | None, value_option("--base", "DIR", _BASE_HELP, None)] = None,
) -> None:
    """Export the model of a run."""
    check_choice("--format", target, FORMATS)
    with percent_progress("writing") as progress:
        options: dict[str, Any] = {"quantization": quantization, "runtime": runtime, "base": base}
        result = export_run(directory, output, target, **options, progress=progress)
    make_console().print(f"the model is in {output}, {result}")
