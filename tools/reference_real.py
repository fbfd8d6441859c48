#!/usr/bin/env python3
"""Reference numbers of real models from their GGUF files: tests/fixtures/<name>_reference.json.

    python tools/reference_real.py smollm2 FILE   # SmolLM2-135M-Instruct Q4_1
    python tools/reference_real.py qwen05 FILE    # Qwen2.5-Coder-0.5B-Instruct Q4_K_M
    python tools/reference_real.py gemma3 FILE    # Gemma 3 270M Q4_K_M (not tuned to chat)

transformers dequantizes the file and runs it in float32 with eager attention; every tensor it loaded is compared with what
gguf.quants.dequantize says, so that neither loader is trusted alone. Per position of a few hundred tokens of mixed text:
`logprobs` (of ids[i] given ids[..i], null for i = 0) and `top5` ([ids, logprobs] of what comes after position i; the first is
the argmax). Per prompt of `greedy`: its ids, 64 ids chosen greedily (fewer if `stop` says that the model ended), and `gaps`,
the lead in logits of each chosen token over the next best: where that is small, another implementation may part company.
"""

import argparse
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf.quants import dequantize

sys.path.insert(0, str(Path(__file__).parent))

from fixturelib import real_text  # noqa: E402
from fixturelib.gguf_export import GEMMA_LAYER_NAMES, LAYER_NAMES, NAMES, separate  # noqa: E402
from fixturelib.reference import dump  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent / "tests" / "fixtures"
# gemma3 gets more than its sliding window of 512; the text is repeated to fill it.
TOKENS = {"smollm2": 370, "qwen05": 200, "gemma3": 600}
GREEDY = 64


def six(x: float) -> float:
    """Six significant digits."""
    return float(f"{float(x):.6g}")


def check_weights(model, file: Path) -> None:
    """Compares every loaded tensor with our own reading of the file."""
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    config = model.config
    gemma = config.model_type.startswith("gemma3")
    table = GEMMA_LAYER_NAMES if gemma else LAYER_NAMES
    state = model.state_dict()
    tied = "output.weight" not in stored
    for name, tensor in state.items():
        if tied and name == "lm_head.weight":
            continue
        if name in NAMES:
            source = NAMES[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            source = f"blk.{layer}.{table[module]}.{kind}"
        found = stored.pop(source)
        w = np.array(dequantize(found.data, found.tensor_type), dtype=np.float32).reshape(tuple(tensor.shape))
        if config.model_type == "llama" and name.endswith("q_proj.weight"):
            w = separate(w, config.num_attention_heads)
        if config.model_type == "llama" and name.endswith("k_proj.weight"):
            w = separate(w, config.num_key_value_heads)
        if gemma and name.endswith("norm.weight"):
            w = w - np.float32(1)
        assert np.array_equal(w, tensor.numpy()), f"{name} differs from {source}"
    assert set(stored) <= {"rope_freqs.weight"}, stored
    print(f"{len(state)} tensors agree with gguf.quants.dequantize", flush=True)


@torch.no_grad()
def score(model, ids: list[int]) -> dict:
    """Log-probabilities and the five best of every position, from one pass."""
    lp = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float(), dim=-1)
    top = lp.topk(5)
    return {
        "ids": ids,
        "logprobs": [None] + [six(lp[i - 1, ids[i]]) for i in range(1, len(ids))],
        "top5": [[i.tolist(), [six(x) for x in v]] for i, v in zip(top.indices, top.values)],
    }


@torch.no_grad()
def greedy(model, ids: list[int], ends: set[int]) -> dict:
    """Up to GREEDY ids with the lead of each; the end-of-turn token is kept as the last one."""
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    chosen, gaps = [], []
    while len(chosen) < GREEDY:
        best = out.logits[0, -1].float().topk(2)
        chosen.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 4))
        if chosen[-1] in ends:
            break
        out = model(input_ids=torch.tensor([chosen[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return {"ids": ids, "greedy": chosen, "gaps": gaps, "stop": chosen[-1] in ends}


def main() -> None:
    """One model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(TOKENS))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    folder, file = args.file.parent, args.file.name
    load = dict(gguf_file=file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **load)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, **load, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    check_weights(model, args.file)
    print(model.config, flush=True)
    fields = gguf.GGUFReader(args.file).fields
    bos = [fields["tokenizer.ggml.bos_token_id"].contents()] if args.name == "gemma3" else []
    ends = {fields["tokenizer.ggml.eos_token_id"].contents()}

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    text_ids = (bos + encode(real_text.TEXT * 2))[:TOKENS[args.name]]
    prompts = []
    if args.name == "gemma3":
        for text in real_text.PLAIN:
            prompts.append({"prompt": text, **greedy(model, bos + encode(text), ends)})
    else:
        for messages in real_text.CHATS:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append({"messages": messages, "prompt": rendered, **greedy(model, encode(rendered), ends)})
    for prompt in prompts:
        prompt["text"] = tokenizer.decode(prompt["greedy"])
        print(f"{min(prompt['gaps']):.4f} {prompt['text']!r}", flush=True)
    scored = score(model, text_ids)
    mean = -sum(scored["logprobs"][1:]) / (len(text_ids) - 1)
    result = {
        "model": args.name,
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager",
        "text": tokenizer.decode(text_ids[len(bos):]),
        "mean_nll": six(mean),
        **scored,
        "greedy": prompts,
    }
    dump(result, ROOT / f"{args.name}_reference.json", limit=100_000)
    print(f"{args.name}: {len(text_ids)} tokens, mean negative log-likelihood {mean:.4f}")


if __name__ == "__main__":
    main()
