// A streamed answer: server-sent events, and what they add up to.

import { CALLS_MAX, LINE_CHARS_MAX, MESSAGE_CHARS_MAX } from './limits.js';

/** A shorter answer has no speed: its tokens came in one piece. */
const SPEED_MIN_S = 0.05;

/** Hands every event's JSON to `take`, up to the stream's terminator. */
export async function events(stream, take) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error('The connection closed before the answer was complete.');
      pending += value;
      const lines = pending.split('\n');
      pending = lines.pop();
      if (pending.length > LINE_CHARS_MAX) throw new Error(`The server sent a line of more than ${LINE_CHARS_MAX} characters.`);
      for (const line of lines) {
        const data = line.trimEnd();
        if (data === 'data: [DONE]') return;
        if (data.startsWith('data: ')) take(parsed(data.slice(6)));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(data) {
  let event = null;
  try {
    event = JSON.parse(data);
  } catch {
    throw new Error('The server sent an event that is not JSON.');
  }
  if (event?.error) throw new Error(String(event.error.message ?? 'The server ended the answer without a reason.'));
  return event ?? {};
}

/** Adds events to a message: content, reasoning, tool calls, the reason of the end, tokens and times. */
export class Reply {
  #message;
  #asked_ms = performance.now();
  #first_ms = null;
  #last_ms = null;
  #tokensBefore = 0;

  constructor(message) {
    this.#message = message;
    // A continued answer keeps what it has.
    this.#tokensBefore = message.stats?.tokens ?? 0;
    this.ttft_ms = message.stats?.ttft_ms ?? null;
  }

  take(event) {
    const message = this.#message;
    const choice = event.choices?.[0];
    const delta = choice?.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? '';
    if (delta.content || reasoning || delta.tool_calls) {
      this.#last_ms = performance.now();
      this.#first_ms ??= this.#last_ms;
      this.ttft_ms ??= this.#first_ms - this.#asked_ms;
    }
    if (reasoning) message.reasoning += reasoning;
    if (delta.content) message.content += delta.content;
    for (const call of delta.tool_calls ?? []) this.#call(call);
    if (message.content.length + message.reasoning.length > MESSAGE_CHARS_MAX) {
      throw new Error(`The answer has more than ${MESSAGE_CHARS_MAX} characters, the limit of this page.`);
    }
    if (choice?.finish_reason) message.end = choice.finish_reason;
    if (event.usage) this.#count(event.usage);
  }

  #call({ index = 0, id, function: part = {} }) {
    const calls = this.#message.calls;
    if (!(index >= 0 && index < CALLS_MAX)) throw new Error(`The answer has more than ${CALLS_MAX} tool calls, the limit of this page.`);
    while (calls.length <= index) calls.push({ id: '', name: '', arguments: '' });
    const call = calls[index];
    if (id) call.id = id;
    if (part.name) call.name = part.name;
    call.arguments += part.arguments ?? '';
  }

  /** Tokens a second: from the first token on, which the wait for the prompt does not slow. */
  #count(usage) {
    const written = usage.completion_tokens ?? 0;
    const seconds = this.#first_ms === null ? 0 : (this.#last_ms - this.#first_ms) / 1000;
    this.#message.stats = {
      tokens: this.#tokensBefore + written,
      tokens_per_second: written > 1 && seconds >= SPEED_MIN_S ? (written - 1) / seconds : null,
      ttft_ms: this.ttft_ms,
      prompt_tokens: usage.prompt_tokens ?? null,
      cached_tokens: usage.prompt_tokens_details?.cached_tokens ?? null,
    };
  }
}
