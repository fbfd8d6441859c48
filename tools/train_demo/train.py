#!/usr/bin/env python3
"""Trains the demo model on this machine's CPU: `train.py RUN_FOLDER --steps N`. Stopped, it goes on where it was.

Two processes of one thread each halve every step's batch and average their gradients (one process of many threads waits at
barriers whenever a neighbour takes a core). Matrices learn by Muon, everything else by AdamW; the rate is flat and falls to zero over the last
part of the steps, so that `--steps` may be changed on the way. A checkpoint is written every two minutes.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import batches
import pictures
import text_tasks
import words
from model import Demo

SEED = 20261121
WARMUP = 60
MATRIX_RATE, OTHER_RATE, FALL = 0.015, 2.5e-3, 0.35
DRAFT_WEIGHT = 0.3
SAVE_EVERY_S, TEST_EVERY_STEPS = 120, 250


def matrices(model: Demo) -> list[torch.nn.Parameter]:
    """The parameters that Muon moves: all matrices of the layers, no embeddings, no first layer."""
    skip = ("embed", "conv1d", "in_proj_a", "in_proj_b")
    return [p for name, p in model.named_parameters() if p.ndim == 2 and not any(s in name for s in skip)]


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz towards the nearest orthogonal matrix of each of a stack [n, rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = g.shape[1] <= g.shape[2]
    x = g if wide else g.transpose(1, 2)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.transpose(1, 2)


class Muon:
    """Momentum, orthogonalized; matrices of one shape go together, and every worker works out its share of the shapes."""

    def __init__(self, parameters, rank: int, workers: int):
        self.groups: dict[torch.Size, list] = {}
        for p in parameters:
            self.groups.setdefault(p.shape, []).append(p)
        self.momentum = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}
        cost = {shape: len(ps) * shape[0] * shape[1] * min(shape) for shape, ps in self.groups.items()}
        loads, self.mine = [0] * workers, set()
        for shape in sorted(cost, key=cost.get, reverse=True):
            least = loads.index(min(loads))
            loads[least] += cost[shape]
            if least == rank:
                self.mine.add(shape)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        updates = {}
        for shape, parameters in self.groups.items():
            g, m = torch.stack([p.grad for p in parameters]), self.momentum[shape]
            m.lerp_(g, 0.05)
            mine = shape in self.mine
            updates[shape] = orthogonal(g.lerp_(m, 0.95)) * max(1, shape[0] / shape[1]) ** 0.5 if mine else torch.zeros_like(m)
        flat = torch.cat([u.flatten() for u in updates.values()])
        dist.all_reduce(flat)
        for (shape, u), part in zip(updates.items(), flat.split([u.numel() for u in updates.values()])):
            for p, one in zip(self.groups[shape], part.view_as(u)):
                p.mul_(1 - rate * 0.02).sub_(one, alpha=rate)


def losses(model: Demo, batch: dict, rng) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropies of the answers and of the head's drafts, weighted."""
    ids, weight = batch["ids"], batch["weight"]
    hidden, angles, rows = model(ids, batch["places"], batch.get("pictures"), batch.get("grid"), batch.get("pads"))
    wanted = batch["answer"][:, 1:]
    logits = hidden[:, :-1][wanted] @ model.table.T
    loss = (F.cross_entropy(logits, ids[:, 1:][wanted], reduction="none") * weight[:, 1:][wanted]).sum()
    # A server may give the head the placeholders' embeddings where the model saw pictures: either must do.
    inputs = rows if rng.random() < 0.5 else F.embedding(ids, model.table)
    out = model.draft(ids, hidden.detach(), angles, inputs.detach())
    wanted = batch["answer"][:, 2:] & batch["answer"][:, 1:-1]
    logits = out[:, :-1][wanted] @ model.table.detach().T
    draft = (F.cross_entropy(logits, ids[:, 2:][wanted], reduction="none") * weight[:, 2:][wanted]).sum()
    return loss, draft


@torch.no_grad()
def right(model: Demo, batch: dict) -> tuple[int, int, int, int]:
    """(rows whose answers would come out greedily, rows, drafts that would be accepted, drafts)."""
    ids, answer = batch["ids"], batch["answer"]
    hidden, angles, rows = model(ids, batch["places"], batch.get("pictures"), batch.get("grid"), batch.get("pads"))
    chosen = (hidden[:, :-1] @ model.table.T).argmax(-1)
    hits = ((chosen == ids[:, 1:]) | ~answer[:, 1:]).all(1)
    guessed = (model.draft(ids, hidden, angles, rows) @ model.table.T).argmax(-1)[:, :-1]
    asked = answer[:, 2:] & answer[:, 1:-1]
    return int(hits.sum()), len(hits), int((guessed == chosen[:, 1:])[asked].sum()), int(asked.sum())


def test(model: Demo, chats, atlas, count: int = 64, seed: int = 999) -> dict:
    """Share of right answers per task over held-out chats, and of drafts accepted."""
    rng, found, drafts = np.random.default_rng(seed), {}, [0, 0]
    for task in pictures.TASKS:
        rows, grids, shots, grid = batches.picture_rows(rng, chats, atlas, count, (64, 64), task, kept=True)
        found[task] = right(model, batches.collate(chats, rows, grids, shots, grid))
    for task, (draw, _) in text_tasks.TASKS.items():
        rows = [chats.chat(draw(rng, kept=True)) for _ in range(count)]
        found[task] = right(model, batches.collate(chats, rows, [[]] * count))
    for _, _, hits, asked in found.values():
        drafts = [drafts[0] + hits, drafts[1] + asked]
    return {task: round(f[0] / f[1], 3) for task, f in found.items()} | {"drafts": round(drafts[0] / drafts[1], 3)}


def rate_at(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARMUP, max(0.0, (steps - step) / (steps * FALL)))


def worker(rank: int, workers: int, args) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    dist.init_process_group("gloo", init_method=f"file://{args.run.resolve()}/meet", rank=rank, world_size=workers)
    chats, atlas, fresh_atlas = words.Chats(words.of_run(args.run)), pictures.Atlas(SEED), None
    model = Demo()
    moved = matrices(model)
    known = {id(p) for p in moved}
    muon = Muon(moved, rank, workers)
    adam = torch.optim.AdamW([p for p in model.parameters() if id(p) not in known], lr=OTHER_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    file, step = args.run / "checkpoint.pt", 0
    if file.exists():
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        adam.load_state_dict(kept["adam"])
        muon.momentum, step = {torch.Size(k): v for k, v in kept["muon"]}, kept["step"]
    if rank == 0:
        print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "from": step}), flush=True)
    saved, seen, started = time.time(), np.zeros(4), time.time()
    parent = os.getppid()
    # A worker whose parent was stopped would wait for its neighbour for ever.
    while step < args.steps and os.getppid() == parent:
        model.zero_grad(set_to_none=False)
        rng = np.random.default_rng([SEED, step, rank, 1])
        for index, batch in enumerate(batches.step_batches(SEED, step, rank, chats, atlas)):
            loss, draft = losses(model, batch, rng)
            (loss + DRAFT_WEIGHT * draft).backward()
            seen += [loss.item(), 0, draft.item(), 0] if index == 0 else [0, loss.item(), 0, draft.item()]
        grads = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= workers
        flat *= min(1.0, 2.0 / float(flat.norm() + 1e-6))
        for g, part in zip(grads, flat.split([g.numel() for g in grads])):
            g.copy_(part.view_as(g))
        rate = rate_at(step, args.steps)
        for group in adam.param_groups:
            group["lr"] = OTHER_RATE * rate
        adam.step()
        muon.step(MATRIX_RATE * rate)
        step += 1
        if rank:
            continue
        if step % 25 == 0:
            names = ("pictures", "texts", "picture_drafts", "text_drafts")
            spent = {"s": round(time.time() - started), "cpu_s": round(time.process_time())}
            print(json.dumps({"step": step} | {n: round(v / 25, 3) for n, v in zip(names, seen)} | spent), flush=True)
            seen[:] = 0
        if step % TEST_EVERY_STEPS == 0 or step == args.steps:
            fresh_atlas = fresh_atlas or pictures.Atlas(SEED + 1)
            print(json.dumps({"step": step} | test(model, chats, fresh_atlas)), flush=True)
        if time.time() - saved > SAVE_EVERY_S or step == args.steps:
            state = {"model": model.state_dict(), "adam": adam.state_dict(), "muon": [(tuple(k), v) for k, v in muon.momentum.items()], "step": step}
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            saved = time.time()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="where checkpoints go; not in the repository")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    (args.run / "meet").unlink(missing_ok=True)
    words.of_run(args.run)
    mp.spawn(worker, (args.workers, args), nprocs=args.workers)
