#!/usr/bin/env python3
"""Counts that say how plain the words are: prose.py [FOLDER]

Prints, for a repository: lines of README.md and its longest line and table cell; the median sentence of README.md and
ARCHITECTURE.md in words; and of 1,000 comment lines of Rust code those with who, whoever, nobody, somebody, everybody, anybody
or whose. `crates/plimsoll/tests/tidy.rs` holds the limits.
"""

import pathlib
import re
import statistics
import sys

root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
VAGUE = re.compile(r"\b(who|whoever|nobody|somebody|everybody|anybody|whose)\b", re.IGNORECASE)


def prose(text):
    """The sentences of a Markdown text, without code, tables, headings and links' targets."""
    text = re.sub(r"```.*?```", " ", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "!["))]
    text = "\n".join(re.sub(r"^\s*([-*]|\d+\.)\s+", "\n\n", line) for line in lines)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    parts = [part for block in re.split(r"\n\s*\n", text) for part in re.split(r"(?<=[.!?:;])\s+", block)]
    return [words for part in parts if len(words := re.findall(r"[\w`'/.-]*\w[\w`'/.-]*", part)) > 2]


for name in ["README.md", "ARCHITECTURE.md"]:
    path = root / name
    if path.exists():
        sentences = [len(words) for words in prose(path.read_text())]
        print(f"{name}: median sentence {statistics.median(sentences):.0f} words of {len(sentences)} sentences")

readme = root / "README.md"
if readme.exists():
    lines = readme.read_text().splitlines()
    cells = [cell.strip() for line in lines if line.startswith("|") for cell in line.strip("|").split("|")]
    print(f"README.md: {len(lines)} lines, longest line {max(map(len, lines))}, longest cell {max(map(len, cells), default=0)}")

comments = vague = 0
for path in root.rglob("*.rs"):
    if "target" in path.parts:
        continue
    for line in path.read_text(errors="replace").splitlines():
        if line.lstrip().startswith("//"):
            comments += 1
            vague += bool(VAGUE.search(line))
if comments:
    print(f"comments: {vague} of {comments} lines, {1000 * vague / comments:.1f} of 1,000")
