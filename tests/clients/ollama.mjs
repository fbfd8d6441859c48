// The official `ollama` package against a running Plimsoll server:
//   URL=http://127.0.0.1:PORT MODULES=DIRECTORY node ollama.mjs
// DIRECTORY holds the package's `node_modules`. Every check is one promise; the first that fails ends the script with exit code 1.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { URL: base, MODULES: modules } = process.env;
const require = createRequire(pathToFileURL(`${modules}/package.json`));
const { Ollama } = require("ollama");

const ollama = new Ollama({ host: base });
const model = "smollm2";
const options = { temperature: 0, num_predict: 48 };
const messages = [{ role: "user", content: "What is the capital of France?" }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", required: ["city"], properties: { city: { type: "string" } } },
  },
};

async function refused(call, status, words) {
  const error = await call().then(() => assert.fail("the call went through"), (error) => error);
  assert.equal(error.status_code, status, String(error));
  for (const word of words) assert.ok(error.message.includes(word), error.message);
}

const checks = {
  async "list, show, ps, version"() {
    const { models } = await ollama.list();
    assert.deepEqual(models.map((one) => one.name), [`${model}:latest`]);
    const shown = await ollama.show({ model });
    assert.ok(shown.capabilities.includes("tools") && shown.model_info["llama.context_length"] === 2048);
    const running = await ollama.ps();
    assert.equal(running.models[0].size_vram, 0);
    assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+$/);
  },

  async "chat, whole and streamed"() {
    const whole = await ollama.chat({ model, messages, options });
    assert.ok(whole.message.content.includes("Paris") && whole.done && whole.done_reason === "stop");
    let text = "";
    let last;
    for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert.equal(text, whole.message.content);
    assert.ok(last.done && last.eval_count === whole.eval_count && last.total_duration > 0);
  },

  async "tools and their results"() {
    const call = { function: { name: "get_weather", arguments: { city: "Paris" } } };
    const told = [
      { role: "user", content: "What is the weather in Paris?" },
      { role: "assistant", content: "", tool_calls: [call] },
      { role: "tool", tool_name: "get_weather", content: "Sunny." },
    ];
    const answer = await ollama.chat({ model, messages: told, tools: [tool], options });
    assert.ok(answer.done && answer.prompt_eval_count > 20);
    const asked = await ollama.chat({ model, messages: told.slice(0, 1), tools: [tool], options });
    for (const { function: made } of asked.message.tool_calls ?? []) assert.equal(typeof made.arguments, "object");
  },

  async "generate, formats"() {
    const raw = await ollama.generate({ model, prompt: "The capital of France is", raw: true, options: { ...options, num_predict: 8 } });
    assert.ok(raw.response.includes("Paris") && raw.eval_count === 8 && raw.done_reason === "length");
    const format = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false };
    const { response } = await ollama.generate({ model, prompt: "Which city?", format, options });
    assert.ok(["Paris", "Rome"].includes(JSON.parse(response).city));
  },

  async "a stream that is broken off"() {
    const stream = await ollama.generate({ model, prompt: "Once upon a time", raw: true, stream: true });
    const reading = (async () => {
      for await (const _ of stream) stream.abort();
    })();
    await assert.rejects(reading, { name: "AbortError" });
  },

  async "pull, delete, errors"() {
    assert.equal((await ollama.pull({ model })).status, "success");
    const statuses = [];
    for await (const part of await ollama.pull({ model, stream: true })) statuses.push(part.status);
    assert.equal(statuses.at(-1), "success");
    await refused(() => ollama.pull({ model: "llama3" }), 404, ["llama3", model]);
    await refused(() => ollama.delete({ model }), 400, ["deletes no models"]);
    await refused(() => ollama.chat({ model: "gpt-4", messages }), 404, ["gpt-4"]);
    await refused(() => ollama.generate({ model, prompt: "x", options: { temperature: -1 } }), 400, ["temperature"]);
    await refused(() => ollama.embed({ model, input: "x" }), 400, ["--pooling"]);
  },
};

for (const [name, check] of Object.entries(checks)) {
  const since = Date.now();
  await check();
  console.log(`ok ${name} (${((Date.now() - since) / 1000).toFixed(2)} s)`);
}
console.log("all good");
