#!/usr/bin/env python3
"""Registers a Plimsoll server as a worker of NVIDIA Dynamo.

Runs beside one server and speaks its HTTP API; it holds no model and no state of its own. Token ids go in and come out, so that
Dynamo's frontend does the text. What the server's prefix cache holds (GET /v1/kv_events) and how much it has to do (GET /v1/loads)
is published, so that the KV router sends a prompt where its beginning is.

When the server drains or dies, the worker leaves: it is unregistered at once, what runs may finish, and the process ends. Requests
that break on the way are reported as such, and Dynamo's frontend continues them elsewhere (`--migration-limit`).

Needs `ai-dynamo-runtime` and `aiohttp`; README.md beside this file says how to install and start it.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
from collections.abc import AsyncIterator

import aiohttp
from dynamo.llm import (
    KvEventPublisher,
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    WorkerMetricsPublisher,
    WorkerType,
    register_model,
    unregister_model,
)
from dynamo.llm.exceptions import CannotConnect, InvalidArgument, StreamIncomplete
from dynamo.runtime import DistributedRuntime

log = logging.getLogger("plimsoll")

# Sampling options that both sides call by the same name.
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
)
GUIDED = {"json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar"}

# Seconds between two looks at the load.
LOAD_INTERVAL = 0.5
# Changes of the cache that are published together, at most.
BATCH = 64
# Longest line of a stream; one event of either has far less.
LINE_BYTES = 1 << 20


class ServerGone(Exception):
    """The server takes nothing new, or does not answer."""


class Server:
    """The HTTP side of one Plimsoll server."""

    def __init__(self, url: str, key: str | None):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No limit on connections: the server has its own, and says so.
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        self.url = url.rstrip("/")
        self.session = aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=timeout, read_bufsize=LINE_BYTES
        )

    async def get(self, path: str) -> dict:
        async with self.session.get(self.url + path, timeout=aiohttp.ClientTimeout(total=10)) as answer:
            if answer.status != 200:
                raise ServerGone(f"{path}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def ready(self) -> bool:
        try:
            await self.get("/ready")
            return True
        except (ServerGone, aiohttp.ClientError, asyncio.TimeoutError):
            return False


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[tuple[str | None, str]]:
    """The data of each server-sent event, with its id."""
    number = None
    while line := await answer.content.readline():
        field, _, value = line.decode().rstrip("\r\n").partition(": ")
        if field == "id":
            number = value
        elif field == "data":
            yield number, value
            number = None


def body_of(request: dict, model: str, context_length: int) -> dict:
    """A request of Dynamo's, already in tokens, as a body for /v1/completions."""
    if request.get("multi_modal_data"):
        raise InvalidArgument("this worker takes text only")
    stop, sampling = request.get("stop_conditions") or {}, request.get("sampling_options") or {}
    wanted = request.get("output_options") or {}
    if (sampling.get("n") or 1) > 1:
        raise InvalidArgument("this worker makes one choice a request: n must be 1")
    body = {"model": model, "prompt": request["token_ids"], "stream": True, "return_token_ids": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    # Who sets no limit has the rest of the context; the completions API would say 16.
    limit = stop.get("max_tokens")
    body["max_tokens"] = max(1, context_length - len(request["token_ids"])) if limit is None else limit
    for name in ("min_tokens", "ignore_eos"):
        body[name] = stop.get(name)
    # Stop strings are the frontend's: it sees the text, and stops this stream when it has seen enough.
    body["stop_token_ids"] = stop.get("stop_token_ids_hidden") or None
    for name in SAMPLING:
        body[name] = sampling.get(name)
    for name, value in (sampling.get("guided_decoding") or {}).items():
        if value is not None and name in GUIDED:
            body[GUIDED[name]] = value
    if wanted.get("logprobs") is not None:
        body["logprobs"] = wanted["logprobs"]
        body["return_tokens_as_token_ids"] = True
    if wanted.get("prompt_logprobs") is not None:
        raise InvalidArgument("prompt_logprobs is not available with stream")
    return {name: value for name, value in body.items() if value is not None}


def id_of(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def logprobs_of(choice: dict) -> dict:
    """Log-probabilities as Dynamo wants them."""
    given = choice.get("logprobs")
    if not given:
        return {}
    out = {"log_probs": given["token_logprobs"]}
    tops = given.get("top_logprobs")
    if tops and any(tops):
        ranked = [sorted((top or {}).items(), key=lambda item: -item[1]) for top in tops]
        out["top_logprobs"] = [
            [
                {"rank": rank, "token_id": id_of(token), "token": token, "logprob": logprob}
                for rank, (token, logprob) in enumerate(top, 1)
            ]
            for top in ranked
        ]
    return out


def usage_of(chunk: dict) -> dict:
    """How many tokens there were, and how many of the prompt's were found."""
    given = chunk.get("usage") or {}
    usage = {name: given.get(name, 0) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    cached = (given.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


class Worker:
    """One server as Dynamo sees it."""

    def __init__(self, server: Server, model: str, context_length: int):
        self.server, self.model, self.context_length = server, model, context_length
        self.leaving = asyncio.Event()
        # Names of pages that the router knows to be here: no more than the server's pool has pages.
        self.published: set[int] = set()

    async def generate(self, request: dict, context) -> AsyncIterator[dict]:
        """One request; each chunk carries the tokens that have come meanwhile."""
        body = body_of(request, self.model, self.context_length)
        stopped = asyncio.ensure_future(context.async_killed_or_stopped())
        finished = False
        try:
            headers = {"x-request-id": context.id()[:128]}
            url = f"{self.server.url}/v1/completions"
            async with self.server.session.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    self.refuse(answer.status, await answer.text())
                stream = events(answer)
                while not finished:
                    coming = asyncio.ensure_future(anext(stream, None))
                    await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
                    if stopped.done():
                        # Leaving the block closes the connection, which ends the request at the server.
                        coming.cancel()
                        return
                    event = coming.result()
                    if event is None:
                        raise StreamIncomplete("the server closed the stream before its end")
                    if event[1] == "[DONE]":
                        return
                    chunk = json.loads(event[1])
                    if error := chunk.get("error"):
                        raise StreamIncomplete(error.get("message", "the server failed"))
                    for choice in chunk.get("choices", []):
                        out = {"token_ids": choice.get("token_ids") or [], "index": 0, **logprobs_of(choice)}
                        if reason := choice.get("finish_reason"):
                            out["finish_reason"] = reason
                            out["completion_usage"] = usage_of(chunk)
                        if out["token_ids"] or reason:
                            yield out
        except aiohttp.ClientConnectorError as error:
            raise CannotConnect(f"the server does not answer: {error}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise StreamIncomplete(f"the connection to the server broke: {error}") from error
        finally:
            stopped.cancel()

    @staticmethod
    def refuse(status: int, text: str):
        try:
            message = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = text
        if status in (429, 503):
            # Full, or shutting down: another worker may take it.
            raise CannotConnect(f"{status}: {message}")
        if 400 <= status < 500:
            raise InvalidArgument(message)
        raise StreamIncomplete(f"{status}: {message}")

    async def follow_cache(self, publisher: KvEventPublisher):
        """Publishes what the prefix cache holds and how it changes, until the server ends the stream or is gone."""
        last = None
        while not self.leaving.is_set():
            headers = {"last-event-id": last} if last else {}
            try:
                async with self.server.session.get(f"{self.server.url}/v1/kv_events", headers=headers) as answer:
                    if answer.status != 200:
                        raise ServerGone(f"/v1/kv_events: {answer.status} {await answer.text()}")
                    async for number, data in events(answer):
                        self.publish(publisher, json.loads(data))
                        last = number or last
            except (ServerGone, aiohttp.ClientError, ConnectionError) as error:
                log.warning("the server's cache cannot be followed: %s", error)
            if not await self.server.ready():
                self.leave("the server is draining or gone")
                return
            await asyncio.sleep(1)

    def publish(self, publisher: KvEventPublisher, event: dict):
        match event["type"]:
            case "reset":
                # Whatever the router believes is void; what is there follows.
                known = list(self.published)
                for start in range(0, len(known), BATCH):
                    publisher.publish_removed(known[start : start + BATCH])
                self.published.clear()
            case "stored":
                tokens = event["tokens"]
                publisher.publish_stored(tokens, [len(tokens)], [event["hash"]], event["parent"])
                self.published.add(event["hash"])
            case "removed" if event["hash"] in self.published:
                publisher.publish_removed([event["hash"]])
                self.published.discard(event["hash"])

    async def tell_load(self, publisher: WorkerMetricsPublisher, page: int):
        """Publishes how many pages are in use, and notices when the server goes."""
        while not self.leaving.is_set():
            try:
                load = (await self.server.get("/v1/loads"))["loads"][0]
                pages = load["num_used_tokens"] // page
                publisher.publish(0, pages, pages)
            except (ServerGone, aiohttp.ClientError, asyncio.TimeoutError):
                if not await self.server.ready():
                    self.leave("the server is draining or gone")
            await asyncio.sleep(LOAD_INTERVAL)

    def leave(self, why: str):
        if not self.leaving.is_set():
            log.info("leaving: %s", why)
            self.leaving.set()


async def run(args: argparse.Namespace):
    server = Server(args.url, os.environ.get("PLIMSOLL_API_KEY"))
    try:
        while not await server.ready():
            await asyncio.sleep(0.2)
        await serve(args, server, await server.get("/server_info"))
    finally:
        await server.session.close()


async def serve(args: argparse.Namespace, server: Server, info: dict):
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, args.discovery_backend, args.request_plane, event_plane=args.event_plane)
    endpoint = runtime.endpoint(f"{args.namespace}.{args.component}.{args.endpoint}")
    page = info["page_size"]
    config = ModelRuntimeConfig()
    config.context_length = info["context_length"]
    config.total_kv_blocks = info["max_total_num_tokens"] // page
    config.max_num_seqs = info["max_running_requests"]
    config.max_num_batched_tokens = info["max_prefill_tokens"]
    # Routers that come later, or have missed something, ask here.
    config.enable_local_indexer = True
    config.kv_event_publishing_enabled = info["kv_events"]
    worker = Worker(server, info["served_model_name"], info["context_length"])
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.leave, f"signal {number}")

    load = WorkerMetricsPublisher()
    await load.create_endpoint(endpoint)
    tasks = [asyncio.create_task(worker.tell_load(load, page), name="telling the load")]
    if info["kv_events"]:
        publisher = KvEventPublisher(endpoint, kv_block_size=page, dp_rank=0, enable_local_indexer=True)
        tasks.append(asyncio.create_task(worker.follow_cache(publisher), name="following the cache"))
    else:
        log.warning("the server was started without --kv-events: the router knows nothing of its cache")

    serving = asyncio.ensure_future(endpoint.serve_endpoint(worker.generate, graceful_shutdown=True))
    await register_model(
        ModelInput.Tokens,
        ModelType.Chat | ModelType.Completions,
        endpoint,
        args.model_path,
        args.model_name or info["served_model_name"],
        worker_type=WorkerType.Aggregated,
        kv_cache_block_size=page,
        runtime_config=config,
        ignore_weights=True,
    )
    print(f"ready: {info['served_model_name']} at {args.url} is a worker of Dynamo", flush=True)
    leaving = asyncio.create_task(worker.leaving.wait())
    # A router that is told nothing any more believes what it was told last: whatever fails here ends the worker.
    done, _ = await asyncio.wait({serving, leaving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    failed = [task for task in tasks if task in done and task.exception()]
    for task in failed:
        log.error("%s has failed", task.get_name(), exc_info=task.exception())
    worker.leave(f"{failed[0].get_name()} has failed" if failed else "the endpoint has ended")
    await unregister_model(endpoint)
    # Ends the endpoint: what runs may finish.
    runtime.shutdown()
    await asyncio.wait({serving}, timeout=args.drain_seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise SystemExit(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server; its key is PLIMSOLL_API_KEY")
    parser.add_argument("--model-path", required=True, help="directory with config.json and tokenizer.json, or a hub name")
    parser.add_argument("--model-name", help="the name clients use [default: the server's]")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="backend")
    parser.add_argument("--endpoint", default="generate")
    parser.add_argument("--drain-seconds", type=float, default=60, help="for what runs when the worker leaves")
    parser.add_argument("--discovery-backend", default=os.environ.get("DYN_DISCOVERY_BACKEND", "file"))
    parser.add_argument("--request-plane", default=os.environ.get("DYN_REQUEST_PLANE", "tcp"))
    parser.add_argument("--event-plane", default=os.environ.get("DYN_EVENT_PLANE", "zmq"))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
