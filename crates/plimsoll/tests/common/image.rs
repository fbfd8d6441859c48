//! Images as clients send them: PNG files with colours that differ from seed to seed, in a body as a data URL.
#![allow(dead_code, reason = "each test binary uses its own part")]

use serde_json::{Value, json};

/// A PNG of this size, stored and not compressed.
pub fn png(width: u32, height: u32, seed: u64) -> Vec<u8> {
    stored(width, height, &rows(width, height, seed))
}

/// The rows of [`png`], each after the byte of its filter.
pub fn rows(width: u32, height: u32, seed: u64) -> Vec<u8> {
    let mut raw = Vec::new();
    for y in 0..height {
        raw.push(0);
        for x in 0..width {
            let mixed =
                (u64::from(x / 4) * 31 + u64::from(y / 4) * 17 + seed * 101).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            raw.extend_from_slice(&mixed.to_be_bytes()[..3]);
        }
    }
    raw
}

/// A PNG of these rows.
pub fn stored(width: u32, height: u32, raw: &[u8]) -> Vec<u8> {
    let mut data = vec![0x78, 0x01];
    let mut blocks = raw.chunks(65_535).peekable();
    while let Some(block) = blocks.next() {
        let len = block.len() as u16;
        data.push(u8::from(blocks.peek().is_none()));
        data.extend_from_slice(&[len.to_le_bytes(), (!len).to_le_bytes()].concat());
        data.extend_from_slice(block);
    }
    data.extend_from_slice(&adler(raw).to_be_bytes());
    file(width, height, &data)
}

/// A PNG with this size in its header and with these data, valid or not.
pub fn file(width: u32, height: u32, data: &[u8]) -> Vec<u8> {
    let head = [&width.to_be_bytes()[..], &height.to_be_bytes(), &[8, 2, 0, 0, 0]].concat();
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &head), chunk(b"IDAT", data), chunk(b"IEND", &[])].concat()
}

fn chunk(kind: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let named = [&kind[..], body].concat();
    [&(body.len() as u32).to_be_bytes()[..], &named, &crc(&named).to_be_bytes()].concat()
}

fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        let crc = crc ^ u32::from(*byte);
        (0..8).fold(crc, |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 })
    })
}

fn adler(bytes: &[u8]) -> u32 {
    let (mut a, mut b) = (1_u32, 0_u32);
    for byte in bytes {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    b << 16 | a
}

/// The bytes as a data URL.
pub fn data_url(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut url = String::from("data:image/png;base64,");
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0_u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        let letters = (0..4).map(|i| char::from(LETTERS[(word >> (18 - 6 * i)) as usize & 63]));
        url.extend(letters.take(three.len() + 1));
        url.extend(std::iter::repeat_n('=', 3 - three.len()));
    }
    url
}

/// The image as a part of a message.
pub fn part(bytes: &[u8]) -> Value {
    linked(&data_url(bytes))
}

/// A part that links to an image.
pub fn linked(url: &str) -> Value {
    json!({"type": "image_url", "image_url": {"url": url}})
}

/// A greedy chat about these parts.
pub fn chat(parts: &[Value], tokens: u32) -> Value {
    let words = json!({"type": "text", "text": "What is this?"});
    let content = [parts, &[words]].concat();
    json!({"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
           "return_token_ids": true, "logprobs": true, "top_logprobs": 3})
}
