// Files that go with a message: what kind each is, whether the model takes it, and small copies of images.

import { bytes } from '../show.js';

const THUMBNAIL_PX = 320;

/** Formats that the server decodes. */
const AUDIO = { wav: 'wav', wave: 'wav', mp3: 'mp3', flac: 'flac', ogg: 'ogg', oga: 'ogg' };
const IMAGE = ['image/png', 'image/jpeg', 'image/gif', 'image/webp'];
export const ACCEPT = {
  image: IMAGE.join(','),
  audio: '.wav,.mp3,.flac,.ogg,.oga',
  text: 'text/*,.md,.json,.csv,.xml,.yaml,.yml,.toml,.log,.rs,.py,.js,.ts,.c,.h,.cpp,.go,.java,.sh,.sql,.html,.css',
};

/** What `file` is for the model: `{kind, format}`. Throws with the reason why it cannot be sent. */
export async function kindOf(file, takes, bodyMax) {
  // In base64 three bytes become four characters.
  const most = Math.floor(((bodyMax - 4096) * 3) / 4);
  if (file.size > most) {
    throw new Error(`${file.name} has ${bytes(file.size)}; this server takes bodies of ${bytes(bodyMax)}, so files of at most ${bytes(most)} (--max-body-bytes).`);
  }
  const ending = file.name.includes('.') ? file.name.split('.').at(-1).toLowerCase() : '';
  if (file.type.startsWith('image/')) {
    if (!takes.includes('image')) throw new Error(`${file.name} is an image. This model takes ${listed(takes)}.`);
    if (!IMAGE.includes(file.type)) throw new Error(`${file.name} is ${file.type}. Images must be PNG, JPEG, GIF or WebP.`);
    return { kind: 'image', format: null };
  }
  if (file.type.startsWith('audio/') || ending in AUDIO) {
    if (!takes.includes('audio')) throw new Error(`${file.name} is audio. This model takes ${listed(takes)}.`);
    if (!(ending in AUDIO)) throw new Error(`${file.name} is ${file.type}. Audio must be WAV, MP3, FLAC or Ogg Vorbis.`);
    return { kind: 'audio', format: AUDIO[ending] };
  }
  try {
    await blobText(file);
  } catch {
    throw new Error(`${file.name} is not text in UTF-8. This model takes ${listed(takes)}.`);
  }
  return { kind: 'text', format: null };
}

const NAMES = { text: 'text files', image: 'images', audio: 'audio' };

function listed(kinds) {
  const names = kinds.map((kind) => NAMES[kind]);
  return names.length === 1 ? names[0] : `${names.slice(0, -1).join(', ')} and ${names.at(-1)}`;
}

/** A file's text. Rejects what is not UTF-8, or holds a zero byte. */
export async function blobText(blob) {
  const content = new TextDecoder('utf-8', { fatal: true }).decode(await blob.arrayBuffer());
  if (content.includes('\0')) throw new Error('the file holds zero bytes');
  return content;
}

/** A Blob as a `data:` URL of `type`. */
export function dataUrl(blob, type) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(type && blob.type !== type ? blob.slice(0, blob.size, type) : blob);
  });
}

/** Draws a small copy. On a canvas the page's policy need not allow images from anywhere. */
export async function thumbnail(blob, canvas) {
  const image = await createImageBitmap(blob);
  const scale = Math.min(1, THUMBNAIL_PX / Math.max(image.width, image.height));
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
}
