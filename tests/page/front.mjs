// A server in front of a real one. It passes requests on, and takes two kinds for itself: the web app's files, read from the source
// tree, and chat completions that a check answers piece by piece.

import { readFile } from 'node:fs/promises';
import { createServer, request as send } from 'node:http';
import { extname, join, normalize } from 'node:path';

const KINDS = { '.html': 'text/html', '.css': 'text/css', '.js': 'text/javascript', '.svg': 'image/svg+xml' };

/**
 * Starts it on `port` (0: any). `files`: the directory of the app, or null to use the real server's. `chat(body, stream)`: answers a chat
 * completion, or returns false to pass it on.
 */
export async function front(backend, { port = 0, files = null, chat = null } = {}) {
  const state = { chat };
  const server = createServer((request, response) => {
    handle(request, response, { backend, files, state }).catch((error) => {
      if (!response.headersSent) response.writeHead(502, { 'content-type': 'text/plain' });
      response.end(String(error));
    });
  });
  await new Promise((resolve) => server.listen(port, '127.0.0.1', resolve));
  const end = () => {
    server.closeAllConnections();
    return new Promise((resolve) => server.close(resolve));
  };
  return { url: `http://127.0.0.1:${server.address().port}`, answers: (next) => (state.chat = next), end };
}

async function handle(request, response, { backend, files, state }) {
  const path = new URL(request.url, 'http://x').pathname;
  if (files !== null && request.method === 'GET' && (path === '/' || path.startsWith('/page/'))) return file(path, response, backend, files);
  if (state.chat === null || path !== '/v1/chat/completions') return pass(request, response, backend);
  const body = JSON.parse(await whole(request));
  await state.chat(body, new Stream(request, response));
}

/** A file of the source tree, under the policy of the real server. */
async function file(path, response, backend, files) {
  const name = path === '/' ? 'index.html' : normalize(path.slice('/page/'.length));
  const content = name.startsWith('..') ? null : await readFile(join(files, name)).catch(() => null);
  if (content === null) return response.writeHead(404).end();
  const policy = (await fetch(backend)).headers.get('content-security-policy');
  response.writeHead(200, { 'content-type': `${KINDS[extname(name)]}; charset=utf-8`, 'content-security-policy': policy, 'cache-control': 'no-store' });
  response.end(content);
}

function pass(request, response, backend) {
  return new Promise((resolve, reject) => {
    const onward = send(`${backend}${request.url}`, { method: request.method, headers: request.headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
      answer.on('end', resolve);
    });
    onward.on('error', reject);
    response.on('close', () => onward.destroy());
    request.pipe(onward);
  });
}

async function whole(request) {
  const parts = [];
  for await (const part of request) parts.push(part);
  return Buffer.concat(parts).toString();
}

/** A streamed chat completion. */
class Stream {
  #begun = false;

  constructor(request, response) {
    this.id = request.headers['x-request-id'];
    this.response = response;
    /** Whether the client has gone. */
    this.gone = false;
    this.closed = new Promise((resolve) => response.on('close', resolve)).then(() => (this.gone = true));
  }

  event(data) {
    if (!this.#begun) this.response.writeHead(200, { 'content-type': 'text/event-stream' });
    this.#begun = true;
    this.response.write(typeof data === 'string' ? data : `data: ${JSON.stringify(data)}\n\n`);
  }

  delta(delta, finish_reason = null, usage = undefined) {
    this.event({ object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason }], usage });
  }

  /** Sends `text` in pieces of `size` characters, with a pause between them. */
  async write(text, { field = 'content', size = 12, every_ms = 5 } = {}) {
    for (let at = 0; at < text.length && !this.gone; at += size) {
      this.delta({ [field]: text.slice(at, at + size) });
      if (every_ms > 0) await new Promise((resolve) => setTimeout(resolve, every_ms));
    }
  }

  end(finish_reason = 'stop', usage = { prompt_tokens: 20, completion_tokens: 40, total_tokens: 60 }) {
    this.delta({}, finish_reason);
    this.event({ choices: [], usage });
    this.event('data: [DONE]\n\n');
    this.response.end();
  }

  refuse(status, message) {
    this.response.writeHead(status, { 'content-type': 'application/json' });
    this.response.end(JSON.stringify({ error: { message, type: 'invalid_request_error', param: null, code: null } }));
  }
}
