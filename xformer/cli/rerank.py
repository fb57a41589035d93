r"""`xformer rerank`: order documents by a query.

Rank the lines of a file by their relevance to a query, with a public cross-encoder such as
ms-marco-MiniLM-L6-v2. Each output line has a score, the number of the line and its text, best first.

\b
  xformer rerank --model ms-marco-MiniLM-L6-v2 --query "Where do pandas live?" --input passages.txt --top-k 5
"""

from __future__ import annotations

from typing import Annotated, Any

from xformer.cli import _io
from xformer.cli._options import CheckpointOption, check_utf8, config_options, file_option, value_option
from xformer.pipelines import Reranker
from xformer.pipelines.options import SearchOptions


@config_options(SearchOptions, names=["batch_tokens"])
def rerank(
    model: CheckpointOption,
    query: Annotated[str, value_option("--query", "TEXT", "The query.", callback=check_utf8)],
    source: Annotated[str, file_option("--input", "Documents, one per line; - is standard input.")] = "-",
    output: Annotated[str, file_option("--output", "File to write; - is standard output.")] = "-",
    top_k: Annotated[int | None, value_option("--top-k", "N", "Write the best N only.", min=1)] = None,
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Order documents by a query."""
    _io.check_output(output, [source], model)
    documents = _io.read_all(source)
    reranker = _io.load_pipeline(Reranker, model, **loading)
    ranked = reranker(query, documents, top_k=top_k, **settings)
    with _io.open_output(output) as write:
        write([f"{score:.4f}\t{position + 1}\t{documents[position]}" for position, score in ranked])
