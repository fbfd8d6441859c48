#!/usr/bin/env python3
"""A GGUF file's weights in bfloat16 with configuration and tokenizer, for engines that want a checkpoint: dequantize.py FILE FOLDER.

Needs torch, transformers 5.19, gguf and accelerate: vLLM's environment of benches/README.md has them.
"""

import sys
from pathlib import Path

import torch
import transformers


def main() -> None:
    """Reads the file and writes the folder."""
    file, folder = Path(sys.argv[1]), sys.argv[2]
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # Unless told so, weights stay packed and cannot be saved.
    packing = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=packing
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
