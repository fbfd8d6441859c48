// The web app in a real Chromium. Run by `cargo test -p plimsoll --test blackbox page`, which starts the servers and names
// them: PLAIN serves the default model, KEYED a hybrid model behind KEY and under a hostile name, ENCODER an embedding model,
// SEEING a model that takes images, HEARING one that takes audio.
// Words on the command line select checks. With SHOTS set to a directory, the checks leave screenshots there.

import * as answers from './answers.mjs';
import * as board from './board.mjs';
import { launch } from './browser.mjs';
import * as chat from './chat.mjs';
import * as conversations from './conversations.mjs';
import * as look from './look.mjs';
import * as models from './models.mjs';

const groups = { board, chat, answers, conversations, models, look };

const browser = await launch();
let failed = 0;
try {
  const wanted = process.argv.slice(2);
  for (const [group, { checks }] of Object.entries(groups)) {
    for (const [check, run] of Object.entries(checks)) {
      const name = `${group}: ${check}`;
      if (wanted.length > 0 && !wanted.some((word) => name.includes(word))) continue;
      const since = Date.now();
      try {
        await run(browser);
        console.log(`ok: ${name} (${((Date.now() - since) / 1000).toFixed(1)} s)`);
      } catch (error) {
        failed += 1;
        console.log(`FAILED: ${name}: ${error.stack}`);
      }
    }
  }
} finally {
  await browser.close();
}
if (failed > 0) throw new Error(`${failed} checks failed`);
console.log('all good');
