// Conversations as a file of JSON, and back. A file is input from outside: every field is checked, and ids are made anew.

import { bytes } from '../show.js';
import { dataUrl } from './attach.js';
import { CALLS_MAX, FILES_MAX, IMPORT_BYTES_MAX, MESSAGES_MAX, MESSAGE_CHARS_MAX, TITLE_CHARS_MAX } from './limits.js';
import { settled } from './settings.js';

const FORMAT = 'plimsoll-conversations';
const VERSION = 1;
const ROLES = ['user', 'assistant', 'tool'];
const KINDS = ['text', 'image', 'audio'];

/** An id that no other conversation, message or file has. */
export function newId() {
  const parts = crypto.getRandomValues(new Uint32Array(4));
  return [...parts].map((part) => part.toString(36).padStart(7, '0')).join('');
}

/** The conversations `ids` with their messages and files, as a Blob of JSON. */
export async function exported(store, ids) {
  const conversations = [];
  for (const id of ids) {
    const conversation = await store.conversation(id);
    if (!conversation) continue;
    const messages = await store.messages(id);
    const files = [];
    for (const { id: file, blob } of await store.files(id)) {
      const url = await dataUrl(blob, '');
      files.push({ id: file, data: url.slice(url.indexOf(',') + 1) });
    }
    conversations.push({ ...conversation, messages, files });
  }
  return new Blob([JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1)], { type: 'application/json' });
}

/** Offers a Blob as a download. */
export function download(blob, name) {
  const url = URL.createObjectURL(blob);
  const link = document.createElement('a');
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Adds the conversations of a file to the store. Returns their number; throws with the reason when the file is wrong. */
export async function imported(store, file, room) {
  if (file.size > IMPORT_BYTES_MAX) throw new Error(`${file.name} has ${bytes(file.size)}, more than the limit of ${bytes(IMPORT_BYTES_MAX)}.`);
  let said = null;
  try {
    said = JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is not JSON: ${error.message}`);
  }
  if (said?.format !== FORMAT || said.version !== VERSION) throw new Error(`${file.name} is not a file of conversations: its format must be ${FORMAT}, version ${VERSION}.`);
  const list = listOf(said, 'conversations', room, 'conversations');
  // All are checked before the first is saved.
  const ready = list.map((one, i) => conversation(one, `conversations[${i}]`));
  for (const one of ready) await store.save(one);
  return ready.length;
}

function conversation(said, at) {
  const id = newId();
  const ids = new Map(listOf(said, 'messages', MESSAGES_MAX, at).map((message, i) => [textOf(message, 'id', `${at}.messages[${i}]`, 200), newId()]));
  const fileIds = new Map();
  const files = listOf(said, 'files', MESSAGES_MAX, at).map((file, i) => {
    const made = newId();
    fileIds.set(textOf(file, 'id', `${at}.files[${i}]`, 200), made);
    return { id: made, conversation: id, blob: blobOf(file, `${at}.files[${i}]`) };
  });
  const messages = said.messages.map((message, i) => messageOf(message, `${at}.messages[${i}]`, { id, ids, fileIds, order: i }));
  const leaf = ids.get(said.leaf) ?? messages.at(-1)?.id ?? null;
  const title = textOf(said, 'title', at, TITLE_CHARS_MAX) || 'Imported';
  const times = { created: time(said.created), updated: time(said.updated) };
  return { conversation: { id, title, named: said.named === true, ...times, leaf, model: typeof said.model === 'string' ? said.model : null, settings: settled(said.settings) }, messages, files };
}

function messageOf(said, at, { id, ids, fileIds, order }) {
  if (!ROLES.includes(said.role)) throw new Error(`${at}.role must be one of ${ROLES.join(', ')}.`);
  if (said.parent !== null && !ids.has(said.parent)) throw new Error(`${at}.parent names no message of the conversation.`);
  const calls = listOf(said, 'calls', CALLS_MAX, at).map((call, i) => ({
    id: textOf(call, 'id', `${at}.calls[${i}]`, 200),
    name: textOf(call, 'name', `${at}.calls[${i}]`, 200),
    arguments: textOf(call, 'arguments', `${at}.calls[${i}]`, MESSAGE_CHARS_MAX),
  }));
  const files = listOf(said, 'files', FILES_MAX, at).map((file, i) => {
    const where = `${at}.files[${i}]`;
    if (!fileIds.has(file.id) || !KINDS.includes(file.kind)) throw new Error(`${where} names no file of the conversation.`);
    const strings = { name: textOf(file, 'name', where, 1000), type: textOf(file, 'type', where, 200) };
    return { id: fileIds.get(file.id), ...strings, size: Number(file.size) || 0, kind: file.kind, format: file.kind === 'audio' ? textOf(file, 'format', where, 20) : null };
  });
  const optional = (name, most) => (said[name] === null || said[name] === undefined ? null : textOf(said, name, at, most));
  return {
    id: ids.get(said.id),
    conversation: id,
    parent: said.parent === null ? null : ids.get(said.parent),
    role: said.role,
    content: textOf(said, 'content', at, MESSAGE_CHARS_MAX),
    reasoning: textOf(said, 'reasoning', at, MESSAGE_CHARS_MAX),
    calls,
    files,
    callId: optional('callId', 200),
    name: optional('name', 200),
    model: optional('model', 1000),
    format: said.format === 'json' ? 'json' : null,
    created: time(said.created),
    order,
    end: optional('end', 40),
    error: optional('error', 100000),
    stats: statsOf(said.stats),
  };
}

function statsOf(said) {
  if (said === null || typeof said !== 'object') return null;
  const names = ['tokens', 'tokens_per_second', 'ttft_ms', 'prompt_tokens', 'cached_tokens'];
  return Object.fromEntries(names.map((name) => [name, Number.isFinite(said[name]) ? said[name] : null]));
}

function listOf(said, name, most, at) {
  const list = said?.[name];
  if (!Array.isArray(list)) throw new Error(`${at}.${name} must be a list.`);
  if (list.length > most) throw new Error(`${at}.${name} has ${list.length} entries; ${most} are allowed here.`);
  return list;
}

function textOf(said, name, at, most) {
  const value = said?.[name];
  if (typeof value !== 'string') throw new Error(`${at}.${name} must be a text.`);
  if (value.length > most) throw new Error(`${at}.${name} has ${value.length} characters, more than the limit of ${most}.`);
  return value;
}

const time = (value) => (Number.isFinite(value) && value > 0 && value < 8.64e15 ? value : Date.now());

function blobOf(file, at) {
  const data = textOf(file, 'data', at, IMPORT_BYTES_MAX);
  try {
    return new Blob([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))]);
  } catch {
    throw new Error(`${at}.data is not base64.`);
  }
}
