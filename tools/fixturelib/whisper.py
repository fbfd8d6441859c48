"""A tiny Whisper, in the form of transformers: an encoder of two seconds of audio, and a decoder that attends to its output.

Sounds are those of omni.py. `reference.json` holds `cases` as in asr.py. An encoder's row is a placeholder in `ids`, which begin with all
of them; the token is the one that ends a text. `rows` are rows of the encoder's output.

`transcripts` are greedy answers of at most `SAID` tokens as transformers' `generate` gives them: for a sound the `prompt` (a text or null),
the `language` (a code, or null: detected), the `task`, the ids that are given (`given`), those that are generated, a detected language,
task and mark for no times included (`said`), and the `text`. `lengths` are rows for so many samples.

`timed` are answers with times, of clips of any length, as `generate` gives them window by window: the `segments` with `start`, `end`,
`tokens` and `text`, the `windows` there were, and of one window the mean log-probability of its tokens (`avg_logprob`), before any rule.
"""

import json

import torch
import transformers
from transformers import WhisperFeatureExtractor, WhisperTimeStampLogitsProcessor

from . import checkpoint, models, omni, reference
from . import tokenizer as tok

DTYPE = "bfloat16"
SECONDS = 2
LANGUAGES = ["en", "de", "fr"]
SPECIALS = [
    "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
]
TIMES = [f"<|{i * 0.02:.2f}|>" for i in range(SECONDS * 50 + 1)]
EXTRA = [*SPECIALS, *TIMES]
IDS = {name: tok.VOCAB_SIZE + i for i, name in enumerate(EXTRA)}
START, PREVIOUS, PLAIN = IDS["<|startoftranscript|>"], IDS["<|startofprev|>"], IDS["<|notimestamps|>"]
END = tok.VOCAB_SIZE - len(tok.SPECIALS)
# Tokens of texts, one that ends a text among the first, and those that a transcript never has.
SUPPRESSED = [1, 2, 7, 8, 9, 10, 14, 25, *(IDS[name] for name in SPECIALS if name in ("<|startoflm|>", "<|startofprev|>", "<|nospeech|>"))]
FIRST = [220, END]
ROWS, TEXT_ROWS, SAID = SECONDS * 50, 64, 16
MARGIN = 0.1
RAW = {
    "activation_function": "gelu", "architectures": ["WhisperForConditionalGeneration"], "bos_token_id": END, "d_model": 32,
    "decoder_attention_heads": 2, "decoder_ffn_dim": 48, "decoder_layers": 2, "decoder_start_token_id": START,
    "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "encoder_layers": 2, "eos_token_id": END, "is_encoder_decoder": True,
    "max_source_positions": ROWS, "max_target_positions": TEXT_ROWS, "model_type": "whisper", "num_mel_bins": omni.BANDS,
    "pad_token_id": END, "scale_embedding": False, "vocab_size": tok.VOCAB_SIZE + len(EXTRA),
}
MODELS = {"whisper": RAW}
# Samples of the sound, and the text of the decoder before the transcript.
CASES = {"short": (5_000, None), "middle": (23_456, "Is the mark dry?"), "full": (SECONDS * omni.RATE, None)}
# Samples, prompt, language, task.
TRANSCRIPTS = [
    (20_000, None, "en", "transcribe"),
    (31_000, None, None, "transcribe"),
    (9_000, "The log of the harbour.", "de", "transcribe"),
    (25_000, None, "fr", "translate"),
]

# Samples, prompt, language, task, most tokens of a window.
TIMED = [
    (20_000, None, "en", "transcribe", 16),
    (9_000, "The log of the harbour.", "de", "transcribe", 16),
    (31_000, None, "fr", "translate", 24),
    (5 * omni.RATE + 77, "Is the mark dry?", "en", "transcribe", 12),
    (75 * omni.RATE + 4_321, None, None, "transcribe", 10),
]
# A choice of `generate` among times and texts is no nearer to a tie than this, and no window moves by less than so many frames.
TIMED_MARGIN, LEAST_FRAMES = 1e-3, SECONDS * 100 // 30


def extractor() -> WhisperFeatureExtractor:
    """The published feature extractor, of fewer bands and for a shorter clip."""
    return WhisperFeatureExtractor(feature_size=omni.BANDS, sampling_rate=omni.RATE, hop_length=160, n_fft=400, chunk_length=SECONDS)


def spectrogram(seed: int, samples: int) -> torch.Tensor:
    """What the processor makes of a sound: [1, bands, frames]."""
    return extractor()(omni.floats(omni.sound(seed, samples)), sampling_rate=omni.RATE, return_tensors="pt")["input_features"]


def before(tokenizer, prompt: str | None) -> list[int]:
    """The prompt's ids, as `get_prompt_ids` of the published tokenizer makes them."""
    return [PREVIOUS, *tokenizer.encode(f" {prompt.strip()}", add_special_tokens=False).ids] if prompt else []


@torch.no_grad()
def case(model, tokenizer, name: str, seed: int) -> dict | None:
    """One case; none if a choice on its greedy path is nearly a tie."""
    samples, prompt = CASES[name]
    values = spectrogram(seed, samples)
    given = [*before(tokenizer, prompt), START, IDS["<|en|>"], IDS["<|transcribe|>"], PLAIN]
    after = lambda said: model(values, decoder_input_ids=torch.tensor([given + said]), use_cache=False).logits[0, -1].float()  # noqa: E731
    greedy, lps, top = [], [], []
    while len(greedy) < SAID:
        logits = after(greedy)
        best, lp = logits.topk(2), torch.log_softmax(logits, dim=-1)
        if float(best.values[0] - best.values[1]) < MARGIN:
            return None
        top = top or [[int(i), reference.short(lp[i])] for i in lp.topk(5).indices]
        greedy.append(int(best.indices[0]))
        lps.append(reference.short(lp[greedy[-1]]))
    wide = model.model.encoder(values).last_hidden_state[0]
    rows = [[row, [reference.short(v) for v in wide[row]]] for row in (0, 3 * ROWS // 4)]
    return {
        "name": name, "items": [{"kind": "sound", "seed": seed, "samples": samples, "frames": values.shape[2]}], "seconds": 1.0,
        "ids": [END] * ROWS + given, "patches": [reference.short(v) for v in values[0].T.flatten()[::omni.PATCH_STEP]], "rows": rows,
        "top5": top, "greedy": greedy, "greedy_logprobs": lps,
    }


@torch.no_grad()
def transcript(model, tokenizer, seed: int, samples: int, prompt: str | None, language: str | None, task: str) -> dict | None:
    """One answer; none if a choice on its greedy path is nearly a tie."""
    values = spectrogram(seed, samples)
    given = [*before(tokenizer, prompt), START]
    forced = [f"<|{language}|>", f"<|{task}|>", "<|notimestamps|>"]
    given += [IDS[name] for name in forced] if language else []
    said, text = [], []
    while len(text) < SAID and END not in text:
        logits = model(values, decoder_input_ids=torch.tensor([given + said]), use_cache=False).logits[0, -1].float()
        if not language and len(said) < 3:
            allowed = [[IDS[f"<|{code}|>"] for code in LANGUAGES], [IDS[forced[1]]], [IDS[forced[2]]]][len(said)]
            logits = torch.full_like(logits, -torch.inf).index_copy(0, torch.tensor(allowed), logits[allowed])
        else:
            logits[SUPPRESSED + ([] if text else FIRST)] = -torch.inf
            logits[[START, PLAIN, *(IDS[name] for name in SPECIALS[1:6])]] = -torch.inf
            logits[PLAIN + 1:] = -torch.inf
            text.append(0)
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < MARGIN:
            return None
        said.append(int(best.indices[0]))
        if text:
            text[-1] = said[-1]
    return {
        "seed": seed, "samples": samples, "prompt": prompt, "language": language, "task": task, "given": given, "said": said,
        "text": tokenizer.decode([i for i in text if i != END], skip_special_tokens=True),
        "prompt_ids": before(tokenizer, prompt), "text_ids": text,
    }


@torch.no_grad()
def agrees(model, found: dict) -> bool:
    """Whether `generate` of transformers says the same."""
    prompt = torch.tensor(found["prompt_ids"]) if found["prompt_ids"] else None
    made = model.generate(
        spectrogram(found["seed"], found["samples"]), language=found["language"], task=found["task"], return_timestamps=False,
        prompt_ids=prompt, do_sample=False, num_beams=1, max_new_tokens=SAID,
    )[0].tolist()
    own = [i for i in found["text_ids"] if i != END]
    return [i for i in made if i < END][-len(own):] == own


class Watched(WhisperTimeStampLogitsProcessor):
    """The rules of times, which remember how near the nearest choice was to a tie."""

    nearest = float("inf")

    def __call__(self, input_ids, scores):
        self._detect_timestamp_from_logprob = False
        before = super().__call__(input_ids, scores)[0].float()
        self._detect_timestamp_from_logprob = True
        after = super().__call__(input_ids, scores)
        texts, times = before[:self.timestamp_begin].max(), before[self.timestamp_begin:].logsumexp(-1)
        best = after[0].topk(2).values
        gaps = [float(best[0] - best[1])] + [abs(float(texts - times))] * bool(torch.isfinite(texts) and torch.isfinite(times))
        Watched.nearest = min(Watched.nearest, *gaps)
        return after


@torch.no_grad()
def timed(model, tokenizer, seed: int, samples: int, prompt: str | None, language: str | None, task: str, most: int) -> dict | None:
    """One answer with times; none if a choice is nearly a tie, or a window moves by very little."""
    from transformers.models.whisper import generation_whisper

    # The whole clip's spectrogram, neither cut off nor filled up.
    values = extractor()(
        omni.floats(omni.sound(seed, samples)), sampling_rate=omni.RATE, return_tensors="pt", truncation=False, padding="longest",
    )["input_features"]
    first = before(tokenizer, prompt)
    seeks, kept = [], (generation_whisper.WhisperTimeStampLogitsProcessor, Watched.nearest)
    generation_whisper.WhisperTimeStampLogitsProcessor, Watched.nearest = Watched, float("inf")
    try:
        made = model.generate(
            values, return_timestamps=True, return_segments=True, condition_on_prev_tokens=False, language=language, task=task,
            prompt_ids=torch.tensor(first) if first else None, do_sample=False, num_beams=1, max_new_tokens=most,
            monitor_progress=lambda progress: seeks.append(int(progress[0, 0])),
        )
    finally:
        generation_whisper.WhisperTimeStampLogitsProcessor, nearest = kept[0], Watched.nearest
    if nearest < TIMED_MARGIN or any(b - a < LEAST_FRAMES for a, b in zip(seeks, seeks[1:])):
        return None
    segments = [
        {
            "start": round(float(found["start"]), 2), "end": round(float(found["end"]), 2), "tokens": found["tokens"].tolist(),
            "text": tokenizer.decode([i for i in found["tokens"].tolist() if i < END], skip_special_tokens=True),
        }
        for found in made["segments"][0]
    ]
    result = {
        "seed": seed, "samples": samples, "prompt": prompt, "language": language, "task": task, "max_tokens": most, "frames": values.shape[2],
        "windows": len(seeks), "segments": segments,
    }
    if len(seeks) == 1:
        said = [token for found in segments for token in found["tokens"]]
        said += [END] * (len(said) < most)
        given = [*first, START, IDS[f"<|{language}|>"], IDS[f"<|{task}|>"]]
        padded = torch.nn.functional.pad(values, (0, SECONDS * 100 - values.shape[2]))
        logits = model(padded, decoder_input_ids=torch.tensor([given + said]), use_cache=False).logits[0].float()
        lps = torch.log_softmax(logits[len(given) - 1:-1], dim=-1)
        result["avg_logprob"] = reference.short(lps.gather(1, torch.tensor(said)[:, None]).mean())
        # What WhisperNoSpeechDetection reads: the token before that of no times, behind the start of the transcript.
        result["no_speech_prob"] = reference.short(logits[len(first)].softmax(-1)[PLAIN - 1])
    return result


def write_files(folder, extended) -> None:
    """Tokenizer and generation settings, as the published checkpoints have them."""
    written = json.loads((folder / "tokenizer_config.json").read_text())
    del written["chat_template"]
    written |= {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "tokenizer_class": "WhisperTokenizer"}
    for token in EXTRA:
        written["added_tokens_decoder"][str(IDS[token])] = {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": token in SPECIALS,
        }
    (folder / "tokenizer_config.json").write_text(json.dumps(written, indent=None, ensure_ascii=False) + "\n")
    generation = {
        "begin_suppress_tokens": FIRST, "bos_token_id": END, "decoder_start_token_id": START, "eos_token_id": END, "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}, "max_initial_timestamp_index": 50, "max_length": TEXT_ROWS,
        "no_timestamps_token_id": PLAIN, "pad_token_id": END, "prev_sot_token_id": PREVIOUS, "return_timestamps": False,
        "suppress_tokens": SUPPRESSED, "task_to_id": {"transcribe": IDS["<|transcribe|>"], "translate": IDS["<|translate|>"]},
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    features = {k: v for k, v in extractor().to_dict().items() if k != "mel_filters"}
    (folder / "preprocessor_config.json").write_text(json.dumps(features, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def make(name: str, folder, tokenizer, seed: int) -> None:
    """The model with its reference."""
    from tokenizers import AddedToken, Tokenizer

    kind = transformers.WhisperForConditionalGeneration
    config = transformers.AutoConfig.for_model("whisper", **{k: v for k, v in RAW.items() if k != "model_type"})
    config._attn_implementation = "eager"
    model = kind(config).float().eval()
    for key, parameter in model.named_parameters():
        noise = torch.from_numpy(models._normal(seed, key, tuple(parameter.shape))).float()
        owner, last = key.split(".")[-2:]
        scale = {"embed_positions": 0.5, "embed_tokens": 0.6}.get(owner, 1.3 / (parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 1))
        value = 0.3 * noise if last == "bias" else 1.0 + 0.2 * noise if parameter.dim() == 1 else scale * noise
        parameter.data.copy_(value.to(getattr(torch, DTYPE)).float())
    checkpoint.fresh(folder)
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in SPECIALS])
    # Times are no special tokens.
    extended.add_tokens([AddedToken(s, normalized=False, special=False) for s in TIMES])
    assert all(extended.token_to_id(token) == id for token, id in IDS.items())
    checkpoint.write_side_files(folder, RAW, DTYPE, extended)
    write_files(folder, extended)
    stored = {k: v.contiguous().to(getattr(torch, DTYPE)) for k, v in sorted(models.state(model).items()) if k != "proj_out.weight"}
    checkpoint.write_tensors(folder, stored)
    loaded, info = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    loaded = loaded.eval()
    for key, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    first = lambda tries, what: next((found for found in tries if found), None) or (_ for _ in ()).throw(RuntimeError(what))  # noqa: E731
    cases = [
        first((case(loaded, extended, kind, attempt * 11 + i) for attempt in range(400)), f"no clear greedy path: {kind}")
        for i, kind in enumerate(CASES)
    ]
    transcripts = [
        first((transcript(loaded, extended, attempt * 7 + i, *asked) for attempt in range(400)), f"no clear transcript: {asked}")
        for i, asked in enumerate(TRANSCRIPTS)
    ]
    for found in transcripts:
        assert agrees(loaded, found), found
        del found["prompt_ids"], found["text_ids"]
    times = [
        first((timed(loaded, extended, attempt * 5 + i, *asked) for attempt in range(200)), f"no clear times: {asked}")
        for i, asked in enumerate(TIMED)
    ]
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32, eager"
    reference.dump(
        {
            "model": folder.name, "made_with": made_with, "cases": cases, "transcripts": transcripts, "timed": times,
            "lengths": [[n, ROWS] for n in (1, 201, 16_000, SECONDS * omni.RATE)],
        },
        folder / "reference.json",
    )
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{folder.name:26} {size / 1000:7.0f} kB   {type(loaded).__name__}", flush=True)
