"""Makes soak/hour.csv: an hour of requests in BurstGPT's format, in bursts.

    python3 tools/make_trace.py > soak/hour.csv

Gaps between requests are drawn from a gamma distribution of shape 0.4 (the burstier, the smaller), lengths from log-normal ones cut at
what a small model's context holds. These are assumptions in the spirit of published traces, not anybody's measurements.
"""

import random

SECONDS = 3600
REQUESTS = 220
SHAPE = 0.4
PROMPT_TOKENS = (110, 0.9, 900)
OUTPUT_TOKENS = (28, 0.7, 160)


def length(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(median * draw.lognormvariate(0, sigma))))


def main() -> None:
    draw = random.Random(20261122)
    gaps = [draw.gammavariate(SHAPE, 1) for _ in range(REQUESTS)]
    scale = SECONDS / sum(gaps)
    print("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type")
    at = 0.0
    for gap in gaps:
        prompt, output = length(draw, *PROMPT_TOKENS), length(draw, *OUTPUT_TOKENS)
        print(f"{at:.1f},ChatGPT,{prompt},{output},{prompt + output},API log")
        at += gap * scale


if __name__ == "__main__":
    main()
