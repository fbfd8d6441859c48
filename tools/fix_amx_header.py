#!/usr/bin/env python3
"""gcc 12's amxtileintrin.h with its operands put right: python3 tools/fix_amx_header.py FOLDER, then compile with -IFOLDER.

The header says that ldtilecfg reads 8 bytes; it reads 64, and the stores to the others are dropped as dead. It does not say at
all that tileloadd reads memory. Needed to build llama.cpp with AMX (benches/README.md); nothing of Plimsoll's.
"""

import subprocess
import sys
from pathlib import Path

CHANGES = {
    '"m" (*((const void **)__config))': '"m" (*(const char (*)[64]) __config)',
    '"r" ((const void*) (base)), "r" ((long) (stride)))': '"r" ((const void*) (base)), "r" ((long) (stride)) : "memory")',
}


def main() -> None:
    """Writes the header."""
    told = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True)
    text = Path(told.stdout.strip(), "amxtileintrin.h").read_text()
    for wrong, right in CHANGES.items():
        if wrong not in text:
            raise SystemExit(f"this gcc's header does not have {wrong}: it may need no change")
        text = text.replace(wrong, right)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "amxtileintrin.h").write_text(text)


if __name__ == "__main__":
    main()
