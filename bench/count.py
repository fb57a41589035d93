"""Count lines of code without blank lines, comments and docstrings: `python bench/count.py` in a checkout."""

from __future__ import annotations

import ast
import collections
import io
import pathlib
import tokenize

LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(text: str) -> int:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        is_documented = isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if is_documented and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def main() -> None:
    lines: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    other: collections.Counter[str] = collections.Counter()
    for root in ("xformer", "tests", "bench", "docs"):
        for path in pathlib.Path(root).rglob("*.py"):
            key = f"xformer/{path.parts[1] if len(path.parts) > 2 else ''}" if root == "xformer" else root
            lines[key] += code_lines(path.read_text(encoding="utf-8"))
            files[key] += 1
    for suffix in ("cpp", "h", "cu", "js"):
        for path in pathlib.Path("xformer").rglob(f"*.{suffix}"):
            if "vendor" not in path.parts:
                code = map(str.strip, path.read_text(encoding="utf-8", errors="replace").splitlines())
                other[suffix] += sum(1 for line in code if line and not line.startswith("//"))
    for key, number in lines.most_common():
        print(f"{key:24} {number:6} lines {files[key]:4} files")
    package = [key for key in lines if key.startswith("xformer")]
    print(
        f"package: {sum(lines[key] for key in package)} lines of Python in {sum(files[key] for key in package)} files, "
        f"{other.total()} of C++, CUDA and JavaScript {dict(other)}; tests {lines['tests']} in {files['tests']}"
    )


if __name__ == "__main__":
    main()
