"""Writes functions of Python's standard library, labelled with their packages, to classify them.

`functions.jsonl` in the current folder has nine tenths of them, and `new.jsonl` the others.
"""

import json
import random
import sysconfig
from pathlib import Path

library = Path(sysconfig.get_path("stdlib"))
examples = []
for label in ("asyncio", "email", "multiprocessing", "unittest"):
    for file in sorted((library / label).glob("*.py")):
        functions = file.read_text(encoding="utf-8").split("    def ")[1:]
        examples += [{"text": f"def {text[:400]}", "label": label} for text in functions]
random.Random(0).shuffle(examples)
num_new = len(examples) // 10
parts = {"new.jsonl": examples[:num_new], "functions.jsonl": examples[num_new:]}
for name, lines in parts.items():
    Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(f"{name}: {len(lines)} examples")
