r"""`xformer summarize`: summarize documents.

Summarize documents with a public checkpoint (a directory in the Hugging Face format) or with the best
model of a training run: one document per line in, one summary per line out.

\b
A file          xformer summarize --model run --input test.abstract --output titles
Ten words each  xformer summarize --model run --input test.abstract \
                  --num-beams 5 --target-length 10 --length-unit words
A large file    xformer summarize --model run --input all.abstract --corpus-out all.titles.d --workers 4
On a topic      xformer summarize --model run --input test.abstract \
                  --sequence-bias "machine translation"

Train a model with: xformer train --task summarization. Input and output are as with `xformer translate`.
"""

from __future__ import annotations

from xformer.cli.translate import line_command
from xformer.pipelines import Summarizer

summarize = line_command(Summarizer)
