// The prefix cache on disk, where there is one.

import { byId, bytes, number, percent, text } from '../show.js';

const CAUSES = {
  gone: 'gone',
  damaged: 'damaged',
  failed: 'not readable',
  slow: 'faster to compute',
  late: 'too late',
  room: 'without room',
  paused: 'while the disk rested',
};

export class Disk {
  show(disk) {
    byId('disk').hidden = !disk;
    if (!disk) return;
    const pinned = disk.pinned_bytes > 0 ? `, ${bytes(disk.pinned_bytes)} pinned` : '';
    const share = percent(disk.bytes / disk.limit_bytes);
    text(byId('disk-holds'), `${bytes(disk.bytes)} of ${bytes(disk.limit_bytes)} (${share}) in ${number(disk.files)} files${pinned}`);
    const rates = `${bytes(disk.read_bytes_per_second)}/s read, ${bytes(disk.write_bytes_per_second)}/s written`;
    const amplification = disk.written_bytes > 0 ? `, write amplification ${disk.write_amplification.toFixed(2)}` : '';
    const media = disk.hit_media > 0 ? ` and ${number(disk.hit_media)} media` : '';
    text(byId('disk-done'), `${number(disk.hit_tokens)} prompt tokens${media} read back; ${rates}${amplification}.`);
    const missed = Object.entries(disk.misses).filter(([, count]) => count > 0);
    const causes = missed.map(([cause, count]) => `${number(count)} ${CAUSES[cause] ?? cause}`);
    text(byId('disk-misses'), causes.length > 0 ? `Misses: ${causes.join(', ')}.` : 'No misses of files that were there.');
  }
}
