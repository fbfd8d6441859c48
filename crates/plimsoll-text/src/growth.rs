//! How much longer a normalizer of the `tokenizers` library may make a text. The library has no limit: forty rules that each put two
//! letters for one would make a terabyte of a word, and a file of two kilobytes can hold them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use crate::error::TextError;

/// The most that is let pass.
const GROWTH_MAX: usize = 16;

/// What stands before every text, or piece of a text, in bytes: no more than this is no growth.
const PREFIX_BYTES: usize = 4;

/// The most stages.
const STAGES_MAX: usize = 64;

/// The longest text that a table of characters (SentencePiece's) may put for one, in bytes. The longest of NFKC, which all known tables are
/// made of, has 33.
const MAPPED_BYTES_MAX: usize = 64;

/// The bound for a `normalizer` stage; 1 where it makes nothing longer by more than NFKC does.
///
/// # Errors
///
/// [`TextError::Unsupported`] beyond what is let pass.
pub(crate) fn of(normalizer: &Value) -> Result<usize, TextError> {
    let mut stages = 0;
    let growth = stage(normalizer, &mut stages);
    if stages > STAGES_MAX {
        return Err(TextError::Unsupported(format!("a normalizer of {stages} stages; the limit is {STAGES_MAX}")));
    }
    if growth > GROWTH_MAX {
        let message = format!("a normalizer that may make a text {growth} times as long; the limit is {GROWTH_MAX}");
        return Err(TextError::Unsupported(message));
    }
    Ok(growth)
}

fn stage(one: &Value, stages: &mut usize) -> usize {
    *stages += 1;
    let length = |value: &Value| value.as_str().map_or(0, str::len);
    match one["type"].as_str().unwrap_or_default() {
        "Sequence" => {
            let parts = one["normalizers"].as_array().into_iter().flatten();
            parts.map(|part| stage(part, stages)).fold(1, usize::saturating_mul)
        }
        // What SentencePiece's models do, once: there are no spaces afterwards.
        "Replace" if one["pattern"]["String"] == " " && one["content"] == "▁" => 1,
        "Replace" => {
            let content = length(&one["content"]);
            match shortest_match(&one["pattern"]) {
                0 => content.saturating_add(1),
                shortest => content.div_ceil(shortest).max(1),
            }
        }
        "Prepend" => length(&one["prepend"]).div_ceil(PREFIX_BYTES).max(1),
        "Precompiled" => {
            let table = STANDARD.decode(one["precompiled_charsmap"].as_str().unwrap_or_default());
            let longest = table
                .ok()
                .as_deref()
                .and_then(mapped)
                .map_or(0, |texts| texts.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0));
            if longest > MAPPED_BYTES_MAX { longest } else { 1 }
        }
        _ => 1,
    }
}

/// The fewest bytes that a pattern takes out of a text; 0 where that is not known.
fn shortest_match(pattern: &Value) -> usize {
    let regex = pattern["Regex"].as_str().and_then(|regex| regex_syntax::parse(regex).ok());
    match regex {
        Some(regex) => regex.properties().minimum_len().unwrap_or(0),
        None => pattern["String"].as_str().map_or(0, str::len),
    }
}

/// The texts of a table of characters, which follow its trie, each ended by a zero.
fn mapped(table: &[u8]) -> Option<&[u8]> {
    let (length, rest) = table.split_first_chunk::<4>()?;
    rest.get(u32::from_le_bytes(*length) as usize..)
}

#[cfg(test)]
mod tests {
    use super::{GROWTH_MAX, of};
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use serde_json::{Value, json};

    fn replace(from: &str, to: &str) -> Value {
        json!({"type": "Replace", "pattern": {"String": from}, "content": to})
    }

    fn growth(normalizers: &[Value]) -> Result<usize, String> {
        of(&json!({"type": "Sequence", "normalizers": normalizers})).map_err(|error| error.to_string())
    }

    #[test]
    fn what_tokenizers_do_is_no_growth_and_what_bombs_do_is() {
        assert_eq!(
            growth(&[json!({"type": "NFC"}), replace(" ", "▁"), json!({"type": "Prepend", "prepend": "▁"})]),
            Ok(1)
        );
        assert_eq!(of(&Value::Null).unwrap(), 1);
        assert_eq!(growth(&[replace("``", "\""), replace("a", "abcdefgh")]), Ok(8));
        let regex = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "});
        assert_eq!(growth(&[regex.clone(), regex.clone()]), Ok(1));
        let everywhere = json!({"type": "Replace", "pattern": {"Regex": "a*"}, "content": " "});
        assert_eq!(growth(&[everywhere.clone(), everywhere.clone()]), Ok(4));
        let bombs = [
            vec![everywhere; 40],
            vec![replace("", "aaaa"); 9],
            vec![replace("aa", "aaaaaaaaa"); 3],
            vec![replace("a", "aa"); 40],
            vec![json!({"type": "Replace", "pattern": {"Regex": "(?=x)"}, "content": "xx"}); 40],
        ];
        for bomb in bombs {
            assert!(growth(&bomb).unwrap_err().contains(&format!("the limit is {GROWTH_MAX}")));
        }
        assert!(growth(&[json!({"type": "Prepend", "prepend": "x".repeat(1 << 16)})]).is_err());
        let many = vec![json!({"type": "Prepend", "prepend": "x"}); 1000];
        assert!(growth(&many).unwrap_err().contains("1001 stages; the limit is 64"));
        let table = |longest: usize| {
            let table = [&4_u32.to_le_bytes()[..], &[1; 4], b"ab\0", &b"c".repeat(longest), b"\0"].concat();
            json!({"type": "Precompiled", "precompiled_charsmap": STANDARD.encode(table)})
        };
        assert_eq!(growth(&[table(33)]), Ok(1));
        assert!(growth(&[table(1000)]).is_err());
    }
}
