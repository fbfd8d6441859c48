// Serves the web app from the source tree in front of a running server, for work on it without a build:
//
//   plimsoll serve demo --port 8000 &
//   node tests/page/serve.mjs http://127.0.0.1:8000 8080      # then open http://127.0.0.1:8080/
//
// A reload of the page shows a change.

import { fileURLToPath } from 'node:url';

import { front } from './front.mjs';

const [backend = 'http://127.0.0.1:8000', port = '8080'] = process.argv.slice(2);
const files = fileURLToPath(new URL('../../crates/plimsoll-server/page', import.meta.url));
const { url } = await front(backend, { port: Number(port), files });
console.log(`${url}: the app from ${files}, everything else from ${backend}`);
