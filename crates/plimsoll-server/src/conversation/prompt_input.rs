//! The `prompt` field of completions: a string, token ids, or a list of either.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

use crate::state::config::MAX_PROMPTS;

/// The prompts of a request, in order.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PromptInput {
    /// Texts to tokenize.
    Texts(Vec<String>),
    /// Token ids, taken as they are.
    Ids(Vec<Vec<u32>>),
}

impl PromptInput {
    pub fn count(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Ids(lists) => lists.len(),
        }
    }
}

impl<'de> Deserialize<'de> for PromptInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor("prompts"))
    }
}

/// A [`PromptInput`] whose errors name `inputs`.
pub(crate) struct Inputs(pub PromptInput);

impl<'de> Deserialize<'de> for Inputs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor("inputs")).map(Self)
    }
}

/// Has the noun for errors.
struct PromptVisitor(&'static str);

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptInput;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of token ids, a list of strings or a list of lists of token ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptInput, E> {
        Ok(PromptInput::Texts(vec![text.into()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptInput, A::Error> {
        let word = self.0;
        let full =
            |n: usize| (n >= MAX_PROMPTS).then(|| A::Error::custom(format_args!("more than {MAX_PROMPTS} {word}")));
        match seq.next_element::<Element>()? {
            None => Err(A::Error::custom(format_args!("the list of {word} is empty"))),
            Some(Element::Text(first)) => {
                let mut texts = vec![first];
                while let Some(text) = seq.next_element()? {
                    full(texts.len()).map_or(Ok(()), Err)?;
                    texts.push(text);
                }
                Ok(PromptInput::Texts(texts))
            }
            Some(Element::Id(first)) => {
                let mut ids = vec![first];
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(PromptInput::Ids(vec![ids]))
            }
            Some(Element::Ids(first)) => {
                let mut lists = vec![first];
                while let Some(ids) = seq.next_element()? {
                    full(lists.len()).map_or(Ok(()), Err)?;
                    lists.push(ids);
                }
                Ok(PromptInput::Ids(lists))
            }
        }
    }
}

/// The first element of a list, which decides the type of the others.
enum Element {
    Text(String),
    Id(u32),
    Ids(Vec<u32>),
}

impl<'de> Deserialize<'de> for Element {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = Element;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }

    fn visit_str<E>(self, text: &str) -> Result<Element, E> {
        Ok(Element::Text(text.into()))
    }

    fn visit_u64<E: serde::de::Error>(self, id: u64) -> Result<Element, E> {
        let id = u32::try_from(id).map_err(|_| E::custom(format_args!("token id {id} is out of range")))?;
        Ok(Element::Id(id))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Element, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = seq.next_element()? {
            ids.push(id);
        }
        Ok(Element::Ids(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<PromptInput, String> {
        serde_json::from_str(json).map_err(|e| e.to_string())
    }

    #[test]
    fn the_four_shapes_and_nothing_else() {
        assert_eq!(parse(r#""a""#), Ok(PromptInput::Texts(vec!["a".into()])));
        assert_eq!(parse(r#"["a","b"]"#), Ok(PromptInput::Texts(vec!["a".into(), "b".into()])));
        assert_eq!(parse("[1,2]"), Ok(PromptInput::Ids(vec![vec![1, 2]])));
        assert_eq!(parse("[[1],[2,3]]"), Ok(PromptInput::Ids(vec![vec![1], vec![2, 3]])));
        for bad in
            ["[]", "{}", "7", "[1,\"a\"]", "[\"a\",1]", "[[1],2]", "[-1]", "[1.5]", "[4294967296]", "[[[1]]]", "[null]"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
        let many = format!("[[]{}]", ",[]".repeat(5000));
        assert!(parse(&many).unwrap_err().contains("more than 2048 prompts"));
    }
}
