// The server's state: memory plan, requests, degradation level, speed. What `/v1/memory` and `/v1/status` say.

import { byId, bytes, number, text } from '../show.js';
import { Charts } from './charts.js';
import { Disk } from './disk.js';
import { Hull } from './hull.js';
import { Degradation } from './levels.js';
import { Requests } from './requests.js';

export class Board {
  #hull = new Hull();
  #degradation = new Degradation();
  #charts = new Charts();
  #disk = new Disk();
  #requests;

  /** `mine(request)` says whether this page sent it; `changed()` is called when a request was cancelled. */
  constructor(mine, changed) {
    this.#requests = new Requests(mine, changed);
  }

  show(memory, status) {
    text(byId('model'), status.model);
    this.#hull.show(memory);
    this.#degradation.show(status.degradation);
    this.#requests.show(status, memory.requests);
    this.#disk.show(status.disk);
    const speed = this.#charts.show(status, performance.now());
    tiles(memory, status, speed);
  }

  /** Whether what is shown is old. */
  stale(old) {
    byId('board').classList.toggle('stale', old);
  }
}

function tiles(memory, status, speed) {
  text(byId('tile-free'), bytes(memory.line_bytes - memory.committed_bytes));
  const gpu = memory.device ? `; GPU ${bytes(memory.device.committed_bytes)} of ${bytes(memory.device.line_bytes)}` : '';
  text(byId('tile-free-of'), `${bytes(memory.committed_bytes)} committed, ${bytes(memory.planned_bytes)} planned${gpu}`);
  text(byId('tile-speed'), number(speed));
  const { generated_tokens: written, prompt_tokens: read, running, waiting } = status.totals;
  text(byId('tile-tokens'), status.generates ? `${number(read)} read, ${number(written)} generated` : `${number(read)} read`);
  const places = status.pools.requests;
  text(byId('tile-requests'), `${number(running)} running`);
  text(byId('tile-waiting'), `of ${number(places.running_max)}; ${number(waiting)} of ${number(places.waiting_max)} waiting`);
}
