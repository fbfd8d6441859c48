//! JSON Schema to a grammar in llguidance's Lark dialect.
//!
//! A schema becomes a form (alternatives of one JSON type each, with negations moved inwards). The form becomes a plan,
//! and the plan becomes rules. Steps, rules and bytes have limits. A keyword that the grammar cannot express is
//! reported and left to the validation of the finished answer, or refused by name.
//!
//! | class | keywords |
//! | --- | --- |
//! | exact | `type`, `enum`, `const`, `allOf`, `anyOf`, `oneOf`, `not`, `if`/`then`/`else`, `$ref`, `$anchor`, `$id`, `$defs`, `properties`, `patternProperties`, `additionalProperties`, `propertyNames`, `required`, `dependentRequired`, `dependentSchemas`, `minProperties`, `maxProperties`, `unevaluatedProperties`, `items`, `prefixItems`, `contains`, `minContains`, `maxContains`, `minItems`, `maxItems`, `unevaluatedItems`, `minLength`, `maxLength`, `pattern`, `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf` |
//! | superset, then validated | `uniqueItems`; a second `contains`; `oneOf` of many schemas that overlap; counts of more than some hundred members; negations of `uniqueItems`, `multipleOf`, `unevaluatedProperties`, `unevaluatedItems` |
//! | refused | references to other documents, `$dynamicRef` that depends on the way, look-around, back references and word boundaries in patterns, `multipleOf` above 10,000 over a wide range |
//!
//! `format` is an annotation: known formats restrict strings, and no format is validated. Objects start with the
//! declared members in their order. Strings have one spelling. Constrained numbers have no exponents. These rules allow
//! a subset of the valid documents, never more.
//!
//! **Invariant:** this crate knows no tokens, no engine and no HTTP. It does not fetch anything.

#![forbid(unsafe_code)]

mod counted;
mod decimal;
mod ecma;
mod emit;
pub mod escaped;
mod expand;
mod form;
mod json;
mod keywords;
mod negate;
mod pattern;
mod plan;
mod refs;
mod values;

use thiserror::Error;

/// Limits and spacing.
#[derive(Clone, Debug)]
pub struct Options {
    /// Between two items, as a pattern.
    pub item_separator: &'static str,
    /// Between a key and its value, as a pattern.
    pub key_separator: &'static str,
    /// Bytes of the grammar.
    pub bytes_max: usize,
    /// Rules of the grammar, and different parts of the schema.
    pub rules_max: usize,
    /// Steps of expanding the schema. A million take less than a second.
    pub work_max: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            item_separator: ",[ \\n]?",
            key_separator: ": ?",
            bytes_max: 1 << 20,
            rules_max: 8_000,
            work_max: 400_000,
        }
    }
}

/// A schema as a grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Rules in Lark's notation. The first is `prefix`.
    pub rules: String,
    /// Keywords that the grammar does not enforce: the finished answer must be validated for them. Empty if the grammar
    /// is exact.
    pub validated: Vec<String>,
}

/// Why there is no grammar.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SchemaError {
    /// The text is not JSON.
    #[error("the schema is not JSON: {0}")]
    Json(String),
    /// A keyword is used in a way that is not supported.
    #[error("{keyword} is not supported here{}: {reason}", place(.at))]
    Unsupported {
        /// The keyword.
        keyword: String,
        /// JSON pointer of the part.
        at: String,
        /// Why.
        reason: String,
    },
    /// A limit.
    #[error("the schema is too complex{}: it has more than {limit} {what}; split or simplify this part", place(.at))]
    TooLarge {
        /// The items that exceed the limit, in the plural.
        what: &'static str,
        /// The limit.
        limit: u64,
        /// JSON pointer of the part; empty for the whole.
        at: String,
    },
    /// It is no schema.
    #[error("the schema is invalid{}: {reason}", place(.at))]
    Invalid {
        /// JSON pointer of the part.
        at: String,
        /// Why.
        reason: String,
    },
    /// No document is valid.
    #[error("no document can satisfy the schema{}: it contradicts itself", place(.at))]
    Unsatisfiable {
        /// JSON pointer of the part; empty for the whole.
        at: String,
    },
}

impl SchemaError {
    /// The error at this part of the schema, unless it names a part itself.
    fn within(mut self, part: &str) -> Self {
        if let Self::Unsupported { at, .. }
        | Self::TooLarge { at, .. }
        | Self::Invalid { at, .. }
        | Self::Unsatisfiable { at } = &mut self
            && at.is_empty()
        {
            part.clone_into(at);
        }
        self
    }
}

fn place(at: &str) -> String {
    if at.is_empty() { String::new() } else { format!(" at {}", at.chars().take(120).collect::<String>()) }
}

/// Compiles a schema (JSON text) into a grammar. `lenient` skips unsupported patterns.
///
/// # Errors
///
/// [`SchemaError`], which names the part of the schema and the limit.
pub fn compile(schema: &str, prefix: &str, lenient: bool, options: &Options) -> Result<Compiled, SchemaError> {
    compile_part(schema, "", prefix, lenient, options)
}

/// Compiles the part of a schema at a JSON pointer. References resolve as in the whole schema.
///
/// # Errors
///
/// As [`compile`], and if `at` does not exist.
pub fn compile_part(
    schema: &str,
    at: &str,
    prefix: &str,
    lenient: bool,
    options: &Options,
) -> Result<Compiled, SchemaError> {
    let json = parse(schema)?;
    let (mut expander, root) = expand::Expander::new(&json, at, lenient, options)?;
    let rules = emit::Emitter::new(prefix, options).rules(&mut expander, &root)?;
    Ok(Compiled { rules, validated: expander.validated })
}

/// JSON pointers of the direct subschemas of the part at `at`.
///
/// # Errors
///
/// The text is not JSON, or `at` does not exist.
pub fn parts(schema: &str, at: &str) -> Result<Vec<String>, SchemaError> {
    let json = parse(schema)?;
    let (references, root) = refs::References::of(&json);
    let place = references.part(&root, at)?;
    Ok(refs::children(&place).into_iter().map(|part| part.at.to_string()).collect())
}

fn parse(schema: &str) -> Result<json::Json, SchemaError> {
    json::Json::parse(schema).map_err(|error| SchemaError::Json(error.to_string()))
}
