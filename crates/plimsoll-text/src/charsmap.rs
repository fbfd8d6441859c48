//! The check of `precompiled_charsmap`, SentencePiece's table of replaced characters, before the `tokenizers` library reads it.
//!
//! The table has the bytes of the trie as a `u32`, the trie, and the text that its values point into. The trie is a double array: a unit
//! has the byte that leads to it, the place of its children, and a flag for the end of a key. The library allocates as many bytes as the
//! first number, and looks bytes up without a check of the array's end. Reference: `Darts::DoubleArray`, as the crate `spm_precompiled`
//! reads it.

use std::collections::VecDeque;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::error::TextError;

/// Most bytes of all tries of a file, which bound the time of the check. The trie of NFKC with lower case has 180 KiB.
const TRIE_BYTES_MAX: usize = 4 << 20;

/// Most bytes of a replacement for each byte that it replaces: NFKC replaces the three bytes of U+FDFA with 33. Memory for encoding is
/// reserved for as many ([`crate::foreign`]).
const LONGER_MAX: usize = 11;

/// Bytes of a key that count towards the allowed length of its replacement.
const KEY_BYTES_MAX: usize = 64;

/// Bytes of a unit, and of the number before the trie.
const UNIT_BYTES: usize = 4;

/// Units in a block of children. Each child is at the index of its byte.
const BLOCK: usize = 256;

/// Checks every table in a normalizer of a `tokenizer.json`, at any depth.
///
/// # Errors
///
/// [`TextError::BadTokenizer`] with the fault of a table.
pub(crate) fn check_all(normalizer: &Value) -> Result<(), TextError> {
    let mut left = TRIE_BYTES_MAX;
    check_within(normalizer, &mut left)
}

fn check_within(normalizer: &Value, left: &mut usize) -> Result<(), TextError> {
    match normalizer {
        Value::Array(stages) => stages.iter().try_for_each(|stage| check_within(stage, left)),
        Value::Object(entries) => entries.iter().try_for_each(|(key, value)| match key.as_str() {
            "precompiled_charsmap" => {
                let bytes = value.as_str().and_then(|text| STANDARD.decode(text).ok());
                let checked =
                    bytes.ok_or_else(|| "is not a text in base64".to_owned()).and_then(|bytes| check(&bytes, left));
                checked.map_err(|what| TextError::BadTokenizer(format!("precompiled_charsmap {what}")))
            }
            _ => check_within(value, left),
        }),
        _ => Ok(()),
    }
}

/// Checks that no lookup of any bytes leaves the array, that every value points into the text, and that no replacement is too long. The
/// error continues a sentence about the table. `left` is the number of bytes that tries may still have.
fn check(bytes: &[u8], left: &mut usize) -> Result<(), String> {
    let Some((size, rest)) = bytes.split_first_chunk::<UNIT_BYTES>() else {
        return Err(format!("has {} bytes; at least {UNIT_BYTES} are needed", bytes.len()));
    };
    let size = u32::from_le_bytes(*size) as usize;
    if size > *left {
        return Err(format!(
            "says that its trie has {size} bytes; at most {TRIE_BYTES_MAX} can be loaded, in all tables together"
        ));
    }
    *left -= size;
    if size == 0 || !size.is_multiple_of(UNIT_BYTES) {
        return Err(format!("says that its trie has {size} bytes; a multiple of {UNIT_BYTES} above 0 is needed"));
    }
    let Some((trie, text)) = rest.split_at_checked(size) else {
        return Err(format!("says that its trie has {size} bytes, and {} follow", rest.len()));
    };
    let text = std::str::from_utf8(text).map_err(|error| format!("has a text that is not UTF-8: {error}"))?;
    let (units, _) = trie.as_chunks::<UNIT_BYTES>();
    walk(&units.iter().map(|unit| Unit(u32::from_le_bytes(*unit))).collect::<Vec<_>>(), text)
}

/// Visits every unit that a lookup can reach.
fn walk(units: &[Unit], text: &str) -> Result<(), String> {
    let count = units.len();
    let mut reached = vec![false; count];
    // The shortest keys come first. Each block is queued with the least number of bytes of its keys.
    let mut blocks = VecDeque::from([(units[0].offset(), 1)]);
    while let Some((place, key)) = blocks.pop_front() {
        // A lookup reads the unit at its next byte before it checks that the unit is a child.
        if place | (BLOCK - 1) >= count {
            return Err(format!("leads to unit {} of a trie of {count}", place | (BLOCK - 1)));
        }
        for byte in 1..BLOCK {
            let (at, unit) = (place ^ byte, units[place ^ byte]);
            // Only one path may lead to a unit, so that each is counted once.
            if unit.label() != byte || std::mem::replace(&mut reached[at], true) {
                continue;
            }
            let next = at ^ unit.offset();
            blocks.push_back((next, KEY_BYTES_MAX.min(key + 1)));
            if unit.has_value() {
                check_value(units.get(next).map(|unit| unit.value()), key, text)?;
            }
        }
    }
    Ok(())
}

/// Checks the value of a key of `key` bytes: the start of its replacement, which ends at a zero byte.
fn check_value(value: Option<usize>, key: usize, text: &str) -> Result<(), String> {
    let Some(place) = value.filter(|value| *value < text.len() && text.is_char_boundary(*value)) else {
        let value = value.map_or("none".to_owned(), |value| value.to_string());
        return Err(format!("has the value {value}, which is no character's place in {} bytes", text.len()));
    };
    let most = LONGER_MAX * key;
    match text.as_bytes()[place..].iter().take(most + 1).take_while(|byte| **byte != 0).count() {
        length if length > most => Err(format!("replaces {key} bytes by more than {most}")),
        _ => Ok(()),
    }
}

/// A unit of the double array.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    /// The byte that leads to this unit. For a value it is greater than a byte.
    fn label(self) -> usize {
        (self.0 & (1 << 31 | 0xff)) as usize
    }

    /// Whether a key ends at this unit. The key's value is the unit at the place of the children.
    fn has_value(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    /// The offset that is combined with this unit's place to get the place of its children.
    fn offset(self) -> usize {
        ((self.0 >> 10) as usize) << ((self.0 & 1 << 9) >> 6)
    }

    /// The value in a unit that is a value.
    fn value(self) -> usize {
        (self.0 & !(1 << 31)) as usize
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::normalizers::Precompiled;

    use super::*;

    /// A table that replaces `a` by `é`, and `ab` by nothing.
    fn table() -> Vec<u8> {
        let mut units = vec![0; 4 * BLOCK];
        let to = |at: usize, place: usize| ((at ^ place) as u32) << 10;
        units[0] = to(0, 256);
        let (a, b) = (256 ^ usize::from(b'a'), 512 ^ usize::from(b'b'));
        units[a] = u32::from(b'a') | 1 << 8 | to(a, 512);
        units[512] = 1 << 31;
        units[b] = u32::from(b'b') | 1 << 8 | to(b, 768);
        units[768] = 1 << 31 | 2;
        of(&units, "é\0".as_bytes())
    }

    fn of(units: &[u32], text: &[u8]) -> Vec<u8> {
        let size = (UNIT_BYTES * units.len()) as u32;
        let trie = units.iter().flat_map(|unit| unit.to_le_bytes());
        size.to_le_bytes().into_iter().chain(trie).chain(text.iter().copied()).collect()
    }

    /// Returns the bytes of a table with one unit changed.
    fn with(at: usize, unit: u32) -> Vec<u8> {
        let mut bytes = table();
        bytes[UNIT_BYTES * (at + 1)..][..UNIT_BYTES].copy_from_slice(&unit.to_le_bytes());
        bytes
    }

    fn check(bytes: &[u8]) -> Result<(), String> {
        super::check(bytes, &mut { TRIE_BYTES_MAX })
    }

    #[test]
    fn all_tables_of_a_file_share_the_limit() {
        let table = |blocks: usize| {
            let text = STANDARD.encode(of(&vec![0; blocks * BLOCK], b""));
            serde_json::json!({"type": "Precompiled", "precompiled_charsmap": text})
        };
        let half = TRIE_BYTES_MAX / UNIT_BYTES / BLOCK / 2;
        assert!(check_all(&serde_json::json!([table(half), table(half)])).is_ok());
        let error = check_all(&serde_json::json!([table(half), table(half), table(1)])).unwrap_err().to_string();
        assert!(error.contains("in all tables together"), "{error}");
    }

    #[test]
    fn a_replacement_is_at_most_eleven_times_as_long() {
        let sound = table();
        let longer =
            |bytes: usize| check(&[&sound[..sound.len() - "é\0".len()], "x".repeat(bytes).as_bytes()].concat());
        // The replacement of `a` is the whole text and ends with it.
        assert_eq!(longer(12).unwrap_err(), "replaces 1 bytes by more than 11");
        assert_eq!(longer(11), Ok(()));
    }

    #[test]
    fn a_sound_table_passes_and_is_the_librarys() {
        assert_eq!(check(&table()), Ok(()));
        let library = Precompiled::from(&table()).unwrap();
        assert_eq!([library.transform("a"), library.transform("b")], [Some("é"), None]);
    }

    #[test]
    fn what_a_lookup_could_leave_is_refused() {
        let a = 256 ^ usize::from(b'a');
        for (bytes, words) in [
            (vec![0; 3], "has 3 bytes; at least 4"),
            (vec![255; 4], "4294967295 bytes; at most 4194304"),
            (vec![0; 4], "has 0 bytes; a multiple of 4 above 0"),
            (vec![6, 0, 0, 0, 1, 2, 3, 4, 5, 6], "has 6 bytes; a multiple of 4"),
            (vec![8, 0, 0, 0, 1, 2, 3, 4], "has 8 bytes, and 4 follow"),
            (of(&[0; 255], b""), "leads to unit 255 of a trie of 255"),
            (with(0, 1024 << 10), "leads to unit 1279 of a trie of 1024"),
            (with(0, 1 << 9 | 4 << 10), "leads to unit 1279 of a trie of 1024"),
            (with(a, u32::from(b'a') | 1 << 20), "leads to unit"),
            (with(a, u32::from(b'a') | 1 << 8 | 1 << 20), "has the value none"),
            (with(512, 1 << 31 | 1), "has the value 1, which is no character's place in 3 bytes"),
            (with(512, 1 << 31 | 3), "has the value 3"),
            (with(768, u32::MAX), "has the value 2147483647"),
            (of(&[0; 256], b"\xff"), "has a text that is not UTF-8"),
        ] {
            let error = check(&bytes).unwrap_err();
            assert!(error.contains(words), "{error}, expected: {words}");
        }
        // A unit that no other unit leads to may have any contents.
        assert_eq!(check(&with(300, u32::MAX)), Ok(()));
        // Units that lead to each other are visited once. A lookup ends at the end of its text.
        assert_eq!(check(&with(a, u32::from(b'a') | ((a ^ 256) as u32) << 10)), Ok(()));
    }

    /// A table with random units that passes the check never makes a lookup panic.
    #[test]
    fn lookups_in_tables_that_pass_stay_inside() {
        let mut dice = 1_u64;
        let mut roll = |below: usize| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) as usize % below
        };
        let (mut passed, mut refused) = (0, 0);
        for _ in 0..2000 {
            let mut units: Vec<u32> = (0..BLOCK * (1 + roll(4))).map(|_| 0).collect();
            let count = units.len();
            for _ in 0..1 + roll(count) {
                let at = roll(count);
                let most = count + roll(2) * 300;
                let (label, offset) = (at & 0xff ^ roll(2), roll(most));
                units[at] = label as u32 | (roll(2) as u32) << 8 | (offset as u32) << 10;
            }
            let bytes = of(&units, &b"x\0".repeat(2048));
            if check(&bytes).is_err() {
                refused += 1;
                continue;
            }
            passed += 1;
            let library = Precompiled::from(&bytes).unwrap();
            for _ in 0..50 {
                let text: String = (0..1 + roll(8)).filter_map(|_| char::from_u32(roll(0x800) as u32)).collect();
                library.transform(&text);
            }
        }
        assert!(passed > 100 && refused > 100, "{passed} passed, {refused} refused");
    }

    #[test]
    fn long_tries_are_checked_in_bounded_time() {
        // Every unit is reached, and leads to a whole block.
        let blocks = TRIE_BYTES_MAX / UNIT_BYTES / BLOCK / 8;
        let to = |at: usize| at ^ ((at / BLOCK * (BLOCK - 1) + at % BLOCK) % blocks * BLOCK);
        let units: Vec<u32> = (0..blocks * BLOCK).map(|at| ((at % BLOCK) | (to(at) << 10)) as u32).collect();
        let begun = std::time::Instant::now();
        assert_eq!(check(&of(&units, b"")), Ok(()));
        assert!(begun.elapsed().as_secs() < 30, "{:?}", begun.elapsed());
    }
}
