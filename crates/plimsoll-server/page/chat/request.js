// From a path of messages and the settings to the body of a request.

import { bytes } from '../show.js';
import { blobText, dataUrl } from './attach.js';

/** Sampling fields that the server has defaults for. */
export const SAMPLING = ['temperature', 'top_p', 'top_k', 'min_p', 'repetition_penalty'];
const OTHER_NUMBERS = ['presence_penalty', 'frequency_penalty', 'max_tokens', 'seed'];

/** The body as JSON. `read(id)` gives a file's Blob. */
export async function requestBody({ path, settings, model, sampling, bodyMax, continues, read }) {
  const messages = [];
  if (settings.system.trim() !== '') messages.push({ role: 'system', content: settings.system });
  for (const message of path) {
    const made = await asMessage(message, read);
    if (made !== null) messages.push(made);
  }
  const request = { model, messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  for (const name of SAMPLING) {
    const value = settings[name] ?? sampling?.[name];
    if (value !== undefined && value !== null) request[name] = value;
  }
  for (const name of OTHER_NUMBERS) if (settings[name] !== null) request[name] = settings[name];
  const stop = settings.stop.split('\n').filter((line) => line !== '');
  if (stop.length > 0) request.stop = stop;
  if (settings.thinking !== 'default') request.enable_thinking = settings.thinking === 'on';
  if (continues) Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  Object.assign(request, tools(settings), format(settings));
  const body = JSON.stringify(request);
  const size = new Blob([body]).size;
  if (size > bodyMax) {
    throw new Error(`This conversation makes a request of ${bytes(size)}; the server takes ${bytes(bodyMax)} (--max-body-bytes). Start a new chat, or edit an earlier message.`);
  }
  return body;
}

/** A message as the API wants it. An answer that failed before its first word is left out. */
async function asMessage(message, read) {
  if (message.role === 'tool') return { role: 'tool', tool_call_id: message.callId, content: message.content };
  if (message.role === 'assistant') {
    if (message.content === '' && message.calls.length === 0) return null;
    const calls = message.calls.map((call) => ({ id: call.id, type: 'function', function: { name: call.name, arguments: call.arguments } }));
    return { role: 'assistant', content: message.content, ...(calls.length > 0 ? { tool_calls: calls } : {}) };
  }
  const parts = [];
  for (const file of message.files) parts.push(await filePart(file, await read(file.id)));
  if (parts.length === 0) return { role: 'user', content: message.content };
  if (message.content !== '') parts.unshift({ type: 'text', text: message.content });
  return { role: 'user', content: parts.every((part) => part.type === 'text') ? parts.map((part) => part.text).join('\n\n') : parts };
}

async function filePart(file, blob) {
  if (blob === null) throw new Error(`The file ${file.name} is not in this browser any more. Edit the message without it.`);
  if (file.kind === 'image') return { type: 'image_url', image_url: { url: await dataUrl(blob, file.type) } };
  if (file.kind === 'audio') {
    const url = await dataUrl(blob, file.type);
    return { type: 'input_audio', input_audio: { format: file.format, data: url.slice(url.indexOf(',') + 1) } };
  }
  const content = await blobText(blob);
  // A fence that the file does not hold.
  let fence = '```';
  while (content.includes(fence)) fence += '`';
  return { type: 'text', text: `File: ${file.name}\n${fence}\n${content}\n${fence}` };
}

function tools(settings) {
  return settings.tools.trim() === '' ? {} : { tools: json(settings.tools, 'The tools', Array.isArray, 'a list') };
}

function format(settings) {
  if (settings.format === 'json') return { response_format: { type: 'json_object' } };
  if (settings.format !== 'schema') return {};
  const isObject = (value) => value !== null && typeof value === 'object' && !Array.isArray(value);
  const schema = json(settings.schema, 'The JSON Schema', isObject, 'an object');
  return { response_format: { type: 'json_schema', json_schema: { name: 'answer', schema, strict: true } } };
}

/** What a field of the settings holds as JSON. */
export function json(words, name, fits, kind) {
  let value = null;
  try {
    value = JSON.parse(words);
  } catch (error) {
    throw new Error(`${name} in the settings are not JSON: ${error.message}`);
  }
  if (!fits(value)) throw new Error(`${name} in the settings must be ${kind}.`);
  return value;
}
