//! The printable alphabet of byte-level BPE: a bijection between the 256 bytes and 256 visible characters.
//!
//! GPT-2 stores its tokens as text in which every byte is one printable character. The printable Latin-1 bytes stand for themselves; the
//! other 68 are numbered from U+0100 upwards in byte order. Later byte-level vocabularies use the same table. SentencePiece vocabularies
//! write single bytes as `<0xNN>` instead ([`byte_token`]).

/// Whether a byte stands for itself in the alphabet.
const fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The character of each byte.
const CHARS: [char; 256] = {
    let mut chars = ['\0'; 256];
    let mut byte = 0;
    let mut next = 0x100;
    while byte < 256 {
        chars[byte] = if is_itself(byte as u8) {
            byte as u8 as char
        } else {
            next += 1;
            match char::from_u32(next - 1) {
                Some(c) => c,
                None => '\0',
            }
        };
        byte += 1;
    }
    chars
};

/// The byte of each character from U+0100 on that stands for a byte other than itself.
const SHIFTED: [u8; 68] = {
    let mut bytes = [0; 68];
    let mut byte = 0;
    let mut next = 0;
    while byte < 256 {
        if !is_itself(byte as u8) {
            bytes[next] = byte as u8;
            next += 1;
        }
        byte += 1;
    }
    bytes
};

/// The character that stands for `byte`.
pub(crate) fn byte_to_char(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `character` stands for, or `None` if it is not part of the alphabet.
pub(crate) fn char_to_byte(character: char) -> Option<u8> {
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => is_itself(byte).then_some(byte),
        Err(_) => SHIFTED.get((code - 0x100) as usize).copied(),
    }
}

/// The bytes that a token's text stands for, or `None` if a character is not part of the alphabet.
pub(crate) fn decode(token: &str) -> Option<Vec<u8>> {
    token.chars().map(char_to_byte).collect()
}

/// The byte of a token named `<0xNN>`.
pub(crate) fn byte_token(name: &str) -> Option<u8> {
    let hex = name.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection() {
        for byte in 0..=255 {
            assert_eq!(char_to_byte(byte_to_char(byte)), Some(byte));
        }
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(0xad), 'Ń');
        assert_eq!(char_to_byte(' '), None);
        assert_eq!(char_to_byte('ń'), None);
    }
}
