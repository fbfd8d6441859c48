//! JSON with numbers that keep their text, so that none is rounded.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// As it is written.
    Number(String),
    String(String),
    Array(Vec<Json>),
    /// In the order of the text. Of a key that stands twice the last value counts.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Reads a text.
    ///
    /// # Errors
    ///
    /// The syntax error.
    pub fn parse(text: &str) -> Result<Self, serde_json::Error> {
        match text.trim_start().bytes().next() {
            Some(b'{') => {
                let Members(members) = serde_json::from_str(text)?;
                let mut all: Vec<(String, Self)> = Vec::with_capacity(members.len());
                for (key, value) in members {
                    let value = Self::parse(value.get())?;
                    match all.iter_mut().find(|(known, _)| *known == key) {
                        Some(known) => known.1 = value,
                        None => all.push((key.into_owned(), value)),
                    }
                }
                Ok(Self::Object(all))
            }
            Some(b'[') => {
                let Items(items) = serde_json::from_str(text)?;
                Ok(Self::Array(items.into_iter().map(|item| Self::parse(item.get())).collect::<Result<_, _>>()?))
            }
            Some(b'"') => Ok(Self::String(serde_json::from_str(text)?)),
            Some(b't' | b'f') => Ok(Self::Bool(serde_json::from_str(text)?)),
            Some(b'n') => serde_json::from_str(text).map(|()| Self::Null),
            _ => {
                let raw: &RawValue = serde_json::from_str(text)?;
                Ok(Self::Number(raw.get().to_owned()))
            }
        }
    }

    /// A member of an object.
    pub fn get(&self, key: &str) -> Option<&Self> {
        self.members().iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// The members of an object; none of anything else.
    pub fn members(&self) -> &[(String, Self)] {
        if let Self::Object(members) = self { members } else { &[] }
    }

    /// The items of an array.
    pub fn items(&self) -> Option<&[Self]> {
        if let Self::Array(items) = self { Some(items) } else { None }
    }

    /// The text of a string.
    pub fn text(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, at: usize| if at > 0 { f.write_str(",") } else { Ok(()) };
        match self {
            Self::Null => f.write_str("null"),
            Self::Bool(value) => write!(f, "{value}"),
            Self::Number(text) => f.write_str(text),
            Self::String(text) => f.write_str(&quoted(text)),
            Self::Array(items) => {
                f.write_str("[")?;
                for (at, item) in items.iter().enumerate() {
                    list(f, at)?;
                    write!(f, "{item}")?;
                }
                f.write_str("]")
            }
            Self::Object(members) => {
                f.write_str("{")?;
                for (at, (key, value)) in members.iter().enumerate() {
                    list(f, at)?;
                    write!(f, "{}:{value}", quoted(key))?;
                }
                f.write_str("}")
            }
        }
    }
}

/// A text as JSON.
pub(crate) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The members of an object, unread.
struct Members<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    all.push((key.into(), map.next_value()?));
                }
                Ok(Members(all))
            }

            fn visit_unit<E: serde::de::Error>(self) -> Result<Self::Value, E> {
                Err(E::custom("an object"))
            }
        }
        from.deserialize_map(Reads).map_err(D::Error::custom)
    }
}

/// The items of an array, unread.
struct Items<'a>(Vec<&'a RawValue>);

impl<'de> Deserialize<'de> for Items<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reads;
        impl<'de> Visitor<'de> for Reads {
            type Value = Items<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = seq.next_element()? {
                    all.push(item);
                }
                Ok(Items(all))
            }
        }
        from.deserialize_seq(Reads)
    }
}

#[cfg(test)]
mod tests {
    use super::Json;

    #[test]
    fn numbers_keep_their_text_and_the_last_of_two_keys_counts() {
        let text = r#"{"a": [1.0, 123456789012345678901234567890, -0, 1e400], "b": "\u00e4\n", "a/b": {"c": null}, "b": true}"#;
        let read = Json::parse(text).unwrap();
        assert_eq!(
            read.to_string(),
            r#"{"a":[1.0,123456789012345678901234567890,-0,1e400],"b":true,"a/b":{"c":null}}"#
        );
        for bad in ["{", "[1,]", "01", "", "{\"a\":}", "nul"] {
            assert!(Json::parse(bad).is_err(), "{bad}");
        }
    }
}
