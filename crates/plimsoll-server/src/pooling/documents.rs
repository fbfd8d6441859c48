//! The `documents` field of reranking: texts, plain or each in an object. They are parsed one at a time, so that no list takes more memory
//! than its body was charged for.

use std::fmt;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use crate::state::config::MAX_PROMPTS;

/// The documents' texts, in order.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Documents(pub Vec<String>);

impl<'de> Deserialize<'de> for Documents {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(List)
    }
}

struct List;

impl<'de> Visitor<'de> for List {
    type Value = Documents;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of texts, or of objects with a `text`")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Documents, A::Error> {
        let mut texts = Vec::new();
        while let Some(Document(text)) = seq.next_element()? {
            if texts.len() == MAX_PROMPTS {
                return Err(A::Error::custom(format_args!("more than {MAX_PROMPTS} documents")));
            }
            texts.push(text);
        }
        Ok(Documents(texts))
    }
}

struct Document(String);

impl<'de> Deserialize<'de> for Document {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(One)
    }
}

/// A document as an object. Clients send an id or a title with the text; only the text is ranked.
#[derive(Deserialize)]
struct WithText {
    text: String,
}

struct One;

impl<'de> Visitor<'de> for One {
    type Value = Document;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, or an object with the field `text`")
    }

    fn visit_str<E>(self, text: &str) -> Result<Document, E> {
        Ok(Document(text.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Document, A::Error> {
        WithText::deserialize(MapAccessDeserializer::new(map)).map(|object| Document(object.text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_give_their_text_and_other_fields_are_ignored() {
        let parse = |json: &str| serde_json::from_str::<Documents>(json).map_err(|error| error.to_string());
        assert_eq!(parse(r#"["a",{"text":"b"}]"#), Ok(Documents(vec!["a".into(), "b".into()])));
        assert_eq!(parse(r#"[{"id":7,"text":"a","meta":{"k":[1]}}]"#), Ok(Documents(vec!["a".into()])));
        for bad in ["\"a\"", "[1]", "[[]]", r#"[{"text":1}]"#, r#"[{"title":"a"}]"#, "[{}]", "[null]"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse(&format!("[\"\"{}]", ",\"\"".repeat(5000))).unwrap_err().contains("more than 2048"));
    }
}
