// The Vercel `ai` package against a running Plimsoll server, through each of its three providers:
//   URL=http://127.0.0.1:PORT MODULES=DIRECTORY node tools.mjs
// DIRECTORY holds the packages' `node_modules`. Every check is one promise; the first that fails ends the script with exit code 1.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const { URL: base, MODULES: modules } = process.env;
const require = createRequire(pathToFileURL(`${modules}/package.json`));
const { generateText, generateObject, streamText, tool, stepCountIs } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { createAnthropic } = require("@ai-sdk/anthropic");
const { z } = require("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const apiKey = "unused";
const model = "smollm2";
const openai = createOpenAI({ baseURL: `${base}/v1`, apiKey });
const providers = {
  "openai, responses": openai.responses(model),
  "openai, chat": openai.chat(model),
  "openai-compatible": createOpenAICompatible({ name: "plimsoll", baseURL: `${base}/v1`, apiKey, supportsStructuredOutputs: true })(model),
  anthropic: createAnthropic({ baseURL: `${base}/v1`, apiKey })(model),
};
const input = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9) });

// The first step must call the tool; later steps may only answer, so that the loop ends.
function ask(model, ran) {
  const execute = async (given) => (ran.push(given), "Sunny, 21 degrees.");
  return {
    model,
    prompt: "What is the weather in Paris?",
    tools: { get_weather: tool({ description: "The weather in a city.", inputSchema: input, execute }) },
    toolChoice: "required",
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
    stopWhen: stepCountIs(3),
    temperature: 0,
    maxOutputTokens: 100,
    maxRetries: 0,
  };
}

function checkSteps(steps, ran) {
  assert.equal(steps.length, 2, "one step calls the tool, one answers");
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.ok(ran.length > 0, "a required call comes");
  assert.deepEqual(steps[0].toolCalls.map((call) => input.parse(call.input)), ran, "each call runs the tool once");
  assert.ok(steps[1].text.length > 0, "the second step answers in text");
}

async function generates(model) {
  const ran = [];
  const { steps } = await generateText(ask(model, ran));
  checkSteps(steps, ran);
  return { ran, text: steps[1].text };
}

async function streams(model, whole) {
  const ran = [];
  const result = streamText({ ...ask(model, ran), onError: ({ error }) => { throw error; } });
  await result.consumeStream();
  checkSteps(await result.steps, ran);
  assert.deepEqual({ ran, text: (await result.steps)[1].text }, whole, "streamed and whole answers agree");
}

async function givesObject(model) {
  const { object } = await generateObject({ model, schema: input, prompt: "Plan a trip.", temperature: 0, maxOutputTokens: 100, maxRetries: 0 });
  input.parse(object);
}

for (const [name, model] of Object.entries(providers)) {
  const since = Date.now();
  const whole = await generates(model);
  await streams(model, whole);
  await givesObject(model);
  console.log(`ok ${name}: tool, streamed tool, object (${((Date.now() - since) / 1000).toFixed(2)} s)`);
}
console.log("all good");
