// Every limit of the chat. A limit that is reached is said with its number.

/** Conversations that the browser keeps. */
export const CONVERSATIONS_MAX = 1000;
/** Messages of one conversation, all branches together. */
export const MESSAGES_MAX = 1000;
/** Characters of one message, typed or generated. */
export const MESSAGE_CHARS_MAX = 4 << 20;
/** Characters of a title. */
export const TITLE_CHARS_MAX = 120;
/** Files of one message. */
export const FILES_MAX = 16;
/** Bytes of a file of conversations. */
export const IMPORT_BYTES_MAX = 256 << 20;
/** Characters of one line of a stream. The server's events are far smaller. */
export const LINE_CHARS_MAX = 1 << 20;
/** Tool calls of one answer. */
export const CALLS_MAX = 128;
/** A partial answer is saved this often. */
export const SAVE_EVERY_MS = 2000;
/** A streamed answer is drawn at most this often. */
export const DRAW_EVERY_MS = 60;
/** Longer code stays without colours. */
export const HIGHLIGHT_CHARS_MAX = 50000;
/** Levels of quotes and lists in an answer. Deeper ones are shown as text. */
export const DEPTH_MAX = 24;
