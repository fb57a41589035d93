"""Write chats of real text for a LoRA run: `python bench/lora_chats.py MULTI30K NUMBER > chats.jsonl`.

The first NUMBER English sentences of the training set (or of `val` with a third argument), each with its German one.
"""

import json
import sys
from pathlib import Path


def main(folder: str, number: str, part: str = "train") -> None:
    english, german = (Path(folder, f"{part}.{name}").read_text(encoding="utf-8").splitlines() for name in ("en", "de"))
    for source, target in zip(english[: int(number)], german, strict=False):
        user = {"role": "user", "content": f"Translate to German: {source}"}
        messages = [user, {"role": "assistant", "content": target}]
        print(json.dumps({"messages": messages}, ensure_ascii=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
