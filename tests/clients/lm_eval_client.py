"""`lm-eval` against the server, as its users run it: python3 lm_eval_client.py BASE

Its `local-completions` model with token ids, echo and log-probabilities, over the small tasks in `lm_eval_tasks/`, which need no
network. Every function whose name starts with `check_` is one promise.
"""

import doctest
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

HERE = os.path.dirname(os.path.abspath(__file__))
REPOSITORY = os.path.dirname(os.path.dirname(HERE))
TASKS_AT = os.path.join(HERE, "lm_eval_tasks")
os.environ |= {"HF_HOME": tempfile.mkdtemp(), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
# The tasks name their data relative to themselves.
os.chdir(TASKS_AT)

import lm_eval
from lm_eval.tasks import TaskManager

sys.path.append(os.path.join(REPOSITORY, "tools"))
import perplexity
from checks import BASE, run

TASKS = ["facts_choice", "facts_words", "facts_rolling"]
with open("facts.jsonl", encoding="utf-8") as file:
    FACTS = [json.loads(line) for line in file]


def post(path, body):
    request = urllib.request.Request(f"{BASE}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


MANAGER = TaskManager(include_path=TASKS_AT, include_defaults=False)


def evaluate(**more):
    model = {"model": "smollm2", "base_url": f"{BASE}/v1/completions", "num_concurrent": 4, "max_length": 512, **more}
    found = lm_eval.simple_evaluate(
        model="local-completions", model_args=model, tasks=TASKS, task_manager=MANAGER, bootstrap_iters=0
    )
    return found["results"], found["samples"]


def sum_of(text, of):
    """The log-probability of `of` after `text`, asked for with text instead of ids."""
    answer = post("/v1/completions", {"prompt": text + of, "max_tokens": 0, "echo": True, "logprobs": 1})
    report = answer["choices"][0]["logprobs"]
    return sum(p for p, at in zip(report["token_logprobs"], report["text_offset"]) if at >= len(text))


def check_a_task_of_each_kind_runs_and_its_numbers_are_the_servers():
    results, samples = ONE
    for task in TASKS:
        print(task, {name: value for name, value in results[task].items() if isinstance(value, float)})
    assert results["facts_choice"]["acc,none"] >= 0.75, results["facts_choice"]
    for sample in samples["facts_choice"]:
        fact = FACTS[sample["doc_id"]]
        for choice, [[said, _greedy]] in zip(fact["choices"], sample["resps"]):
            expected = sum_of(fact["question"], choice)
            assert abs(float(said) - expected) < 1e-3, (fact["question"], choice, said, expected)
    for sample in samples["facts_words"]:
        body = {"prompt": FACTS[sample["doc_id"]]["question"], "max_tokens": 8, "temperature": 0, "stop": ["\n", "."]}
        assert sample["resps"][0][0] == post("/v1/completions", body)["choices"][0]["text"], sample
    assert 1 < results["facts_rolling"]["word_perplexity,none"] < 1e6, results["facts_rolling"]


def check_batches_say_the_same():
    one, _ = ONE
    many, _ = evaluate(tokenized_requests=True, batch_size=4)
    for task in TASKS:
        of = lambda results: {name: value for name, value in results[task].items() if isinstance(value, float)}
        assert of(one) == of(many), (task, of(one), of(many))


def check_the_perplexity_of_a_fixed_text_is_that_of_float32_and_near_llama_cpps():
    # The first windows of benches/quality.md, as its commands give them with `--windows 4`.
    float32, llama = 17.1343, 17.1885
    failed, tried = doctest.testmod(perplexity)
    assert tried > 4 and failed == 0
    text = perplexity.text_of(Path(REPOSITORY, "benches/opticks.txt"))
    seen = perplexity.score(BASE, text, count=4).perplexity
    print(f"perplexity {seen:.4f}, float32 {float32}, llama.cpp {llama}")
    assert abs(seen / float32 - 1) < 0.001, (seen, float32)
    assert abs(seen / llama - 1) < 0.005, (seen, llama)


ONE = evaluate(tokenized_requests=True)
run(globals())
