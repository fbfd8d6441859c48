//! Checks of an answer beyond its grammar: no repeated key, and validation by an independent validator.
//!
//! One library compiles a schema into a grammar, and another validates the answer. An error in either one causes a
//! refusal, not a wrong answer. Some grammars allow more than their schema (`uniqueItems`). There the checks remove a
//! token once no continuation can satisfy the schema.
//!
//! Out of scope: how a mask is computed, and the process that validates ([`crate::sandbox`]).

mod candidates;
mod document;
mod violation;

use self::candidates::Candidates;
use self::document::Document;
pub(crate) use self::violation::violation_message;
use self::violation::{is_final, open_containers};
use crate::depth::Depth;
use crate::json_scanner::JsonScanner;
use crate::sandbox::Violation;

/// A schema for documents in an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    /// The tool that the documents are arguments of; `None` for other documents.
    pub tool: Option<String>,
    /// The schema as JSON text. `None` if only keys are checked.
    pub schema: Option<String>,
    /// The grammar allows only documents that the schema allows.
    pub exact: bool,
}

/// Positions of the JSON documents in an answer, and their schemas. Numbers are indexes into `rules`.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// For an answer that is one document: the fixed text before it.
    pub whole: Option<(Vec<u8>, usize)>,
    /// Texts that a document follows.
    pub call_heads: Vec<(Vec<u8>, usize)>,
    /// Texts that start a call, for answers that are calls or one document.
    pub call_openings: Vec<Vec<u8>>,
    pub rules: Vec<Rule>,
}

impl Layout {
    /// Whether incomplete documents are validated.
    pub fn validates_incrementally(&self) -> bool {
        self.rules.iter().any(|rule| !rule.exact && rule.schema.is_some())
    }

    /// Depth of the deepest schema.
    pub fn depth(&self) -> Depth {
        self.rules.iter().filter_map(|rule| rule.schema.as_deref()).map(Depth::of_json).max().unwrap_or_default()
    }
}

/// Validates documents against a schema and returns the violations of each. An error says why validation failed.
pub(crate) type Validate<'a> = dyn Fn(&str, &[String]) -> Result<Vec<Vec<Violation>>, String> + 'a;

/// Tracks the JSON documents in one answer.
#[derive(Clone, Debug)]
pub(crate) struct DocumentTracker {
    text: Vec<u8>,
    document: Option<Document>,
    /// A document was found, so the whole answer is not one document.
    document_found: bool,
    /// Documents that ended and are not validated yet.
    unvalidated: Vec<(usize, String)>,
    /// Documents that are valid with the token that ends them.
    known_valid: Vec<String>,
}

/// Tokens to remove from a mask.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Rejected {
    pub tokens: Vec<u32>,
    /// Remove the end tokens too.
    pub ends: bool,
    /// Tokens that leave a value invalid unless it continues. Only the grammar can tell whether it can.
    pub uncertain: Vec<u32>,
}

impl DocumentTracker {
    pub fn new(layout: &Layout) -> Self {
        let mut tracker = Self {
            text: Vec::new(),
            document: None,
            document_found: false,
            unvalidated: Vec::new(),
            known_valid: Vec::new(),
        };
        tracker.find_start(layout);
        tracker
    }

    /// Adds the bytes of a token.
    pub fn push(&mut self, layout: &Layout, bytes: &[u8]) {
        for byte in bytes {
            self.text.push(*byte);
            if self.document.is_some() {
                self.advance(self.text.len());
            } else {
                self.find_start(layout);
            }
        }
    }

    /// Advances the document by the byte before `until`.
    fn advance(&mut self, until: usize) {
        let Some(document) = &mut self.document else { return };
        if document.push(&self.text[..until]) {
            let text = String::from_utf8_lossy(&self.text[document.start..until]).into_owned();
            if !self.known_valid.contains(&text) {
                self.unvalidated.push((document.rule, text));
            }
            self.document = None;
        }
    }

    /// Whether the text is inside a document.
    pub fn is_in_document(&self) -> bool {
        self.document.as_ref().is_some_and(|document| self.text.len() > document.start)
    }

    /// Whether checks may remove every token that the grammar allows here. True if the grammar allows more than the
    /// schema, and in a key after other keys.
    pub fn may_reject_all(&self, layout: &Layout) -> bool {
        self.document.as_ref().is_some_and(|document| {
            let rule = &layout.rules[document.rule];
            let keys = document.keys.last().is_some_and(|keys| !keys.is_empty());
            !rule.exact && rule.schema.is_some() || keys && document.scanner.expects_key()
        })
    }

    /// Starts a document if one starts here, or if the text so far turns out to be one.
    fn find_start(&mut self, layout: &Layout) {
        let head = layout
            .call_heads
            .iter()
            .find(|(head, _)| self.text.ends_with(head))
            .map(|(_, rule)| (self.text.len(), *rule));
        let calls = || layout.call_openings.iter().any(|opening| opening.starts_with(&self.text));
        let whole = layout
            .whole
            .as_ref()
            .filter(|(prefix, _)| !self.document_found && self.text.starts_with(prefix) && !calls());
        let Some((start, rule)) = head.or(whole.map(|(prefix, rule)| (prefix.len(), *rule))) else { return };
        self.document_found = true;
        self.document = Some(Document { rule, start, scanner: JsonScanner::default(), key: 0, keys: Vec::new() });
        (start + 1..=self.text.len()).for_each(|until| self.advance(until));
    }

    /// Validates documents that ended since the last call. With `at_end`, also the document that ends with the answer.
    pub fn validate_ended(&mut self, layout: &Layout, at_end: bool, validate: &Validate<'_>) -> Result<(), String> {
        let rest =
            self.document.as_ref().filter(|_| at_end).map(|document| (document.rule, self.document_text(document)));
        for (rule, document) in std::mem::take(&mut self.unvalidated).into_iter().chain(rest) {
            let Some(schema) = &layout.rules[rule].schema else { continue };
            if let Some(violation) =
                validate(schema, &[document])?.pop().and_then(|violations| violations.into_iter().next())
            {
                return Err(violation_message(&violation));
            }
        }
        Ok(())
    }

    fn document_text(&self, document: &Document) -> String {
        String::from_utf8_lossy(&self.text[document.start..]).into_owned()
    }

    /// The tokens to remove from a mask. `tokens` are the allowed ones that may end a JSON value. `end` says whether
    /// the mask has an end token.
    pub fn rejected(
        &mut self,
        layout: &Layout,
        tokens: &mut dyn Iterator<Item = (u32, &[u8])>,
        end: bool,
        validate: &Validate<'_>,
    ) -> Result<Rejected, String> {
        self.validate_ended(layout, false, validate)?;
        self.known_valid.clear();
        let Some(document) = &self.document else { return Ok(Rejected::default()) };
        let rule = &layout.rules[document.rule];
        let schema = rule.schema.as_deref();
        let mut rejected = Vec::new();
        // Texts to validate, each with the tokens that lead to it.
        let (mut whole, mut parts, mut open_values) =
            (Candidates::default(), Candidates::default(), Candidates::default());
        for (id, bytes) in tokens {
            let outcome = document.outcome(&self.text, bytes);
            if outcome.repeats_key {
                rejected.push(id);
                continue;
            }
            if schema.is_none() || rule.exact {
                continue;
            }
            let text = |until: usize| [&self.text[document.start..], &bytes[..until]].concat();
            let fits = match (outcome.ends_document, outcome.ends_value) {
                (Some(until), _) => whole.add(id, text(until)),
                (None, Some((until, scanner))) => {
                    let closed: Vec<u8> = text(until).into_iter().chain(scanner.closers()).collect();
                    parts.add_open(id, closed, scanner.depth())
                }
                (None, None) => true,
            };
            if let Some(scanner) = outcome.open_value {
                let closed: Vec<u8> = text(bytes.len()).into_iter().chain(scanner.closers()).collect();
                open_values.add_open(id, closed, scanner.depth());
            }
            if !fits {
                rejected.push(id);
            }
        }
        let (mut ends, mut uncertain) = (false, Vec::new());
        if let Some(schema) = schema {
            if end {
                let violations = validate(schema, &[self.document_text(document)])?;
                ends = violations.first().is_some_and(|violations| !violations.is_empty());
            }
            self.known_valid =
                whole.validate_all(schema, validate, &mut rejected, |violations, _, _| violations.is_empty())?;
            let may_still_pass = |violations: &[Violation], text: &str, depth| {
                let open = open_containers(text, depth);
                !violations.iter().any(|violation| is_final(violation, &open))
            };
            parts.validate_all(schema, validate, &mut rejected, may_still_pass)?;
            open_values.validate_all(schema, validate, &mut uncertain, may_still_pass)?;
            uncertain.retain(|token| !rejected.contains(token));
        }
        Ok(Rejected { tokens: rejected, ends, uncertain })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::{DocumentTracker, Layout, Rejected, Rule, Violation};

    fn layout(exact: bool) -> Layout {
        let rules = vec![Rule { tool: None, schema: Some("{}".into()), exact }];
        Layout { whole: Some((Vec::new(), 0)), rules, ..Layout::default() }
    }

    fn violation(keyword: &str, instance: &str, schema: &str) -> Violation {
        Violation { keyword: keyword.into(), instance: instance.into(), schema: schema.into() }
    }

    /// The tokens rejected after `text`, and the validated documents. Documents in `bad` violate `uniqueItems`.
    fn rejected_after(text: &str, tokens: &[&str], bad: &[&str]) -> (Vec<u32>, Vec<String>) {
        let layout = layout(false);
        let mut tracker = DocumentTracker::new(&layout);
        tracker.push(&layout, text.as_bytes());
        let validated = RefCell::new(Vec::new());
        let validate = |_: &str, documents: &[String]| {
            validated.borrow_mut().extend(documents.to_vec());
            let judge =
                |text: &String| bad.contains(&text.as_str()).then(|| violation("uniqueItems", "", "/uniqueItems"));
            Ok(documents.iter().map(|text| judge(text).into_iter().collect()).collect())
        };
        let mut tokens = (0..).zip(tokens.iter().map(|token| token.as_bytes()));
        let Rejected { tokens: mut rejected, ends, .. } =
            tracker.rejected(&layout, &mut tokens, false, &validate).unwrap();
        assert!(!ends);
        rejected.sort_unstable();
        (rejected, validated.into_inner())
    }

    #[test]
    fn repeated_keys_are_rejected() {
        let tokens = ["\"", "b\"", "\": 1, \"x", "\\u0061\""];
        assert_eq!(rejected_after(r#"{"a": 1, "b": 2, "a"#, &tokens, &[]).0, [0, 2]);
        // Each object has its own keys.
        assert_eq!(rejected_after(r#"{"a": {"b": 1, "#, &["\"a\"", "\"b\"", "\"\\u0062\""], &[]).0, [1, 2]);
        assert_eq!(rejected_after(r#"{"a": {"b": 1"#, &["}, \"b\"", "}, \"a\""], &[]).0, [1]);
        // A string value is not a key.
        assert_eq!(rejected_after(r#"{"a": 1, "b": "a"#, &["\""], &[]).0, Vec::<u32>::new());
    }

    #[test]
    fn tokens_that_end_an_invalid_document_are_rejected() {
        let (rejected, validated) = rejected_after(r#"{"a": 1"#, &["}", "0}", ","], &[r#"{"a": 1}"#]);
        assert_eq!(validated, [r#"{"a": 1}"#, r#"{"a": 10}"#, r#"{"a": 1}"#]);
        assert_eq!(rejected_after(r#"["a", "a"#, &["\"", "b\""], &[r#"["a", "a"]"#]).0, [0]);
        // Documents that may still grow are rejected only for final violations, such as repeated items.
        assert_eq!(rejected, [0, 2]);
        assert_eq!(rejected_after("[1, 1", &[",", "2,", "]"], &["[1, 1]"]).0, [0, 2]);
    }

    #[test]
    fn invalid_numbers_that_may_continue_are_uncertain() {
        let layout = layout(false);
        let mut tracker = DocumentTracker::new(&layout);
        tracker.push(&layout, b"[1, ");
        let validate = |_: &str, documents: &[String]| {
            let judge = |text: &String| (text == "[1, 1]").then(|| violation("uniqueItems", "", "/uniqueItems"));
            Ok(documents.iter().map(|text| judge(text).into_iter().collect()).collect())
        };
        let tokens: [(u32, &[u8]); 3] = [(0, b"1"), (1, b"2"), (2, b"1]")];
        let rejected = tracker.rejected(&layout, &mut tokens.into_iter(), false, &validate).unwrap();
        assert_eq!(rejected, Rejected { tokens: vec![2], ends: false, uncertain: vec![0] });
    }

    #[test]
    fn documents_start_after_their_heads() {
        let rules = ["0", "1"].map(|schema| Rule { tool: None, schema: Some(schema.into()), exact: true }).into();
        let call_heads = vec![(b"<f>".to_vec(), 0), (b"{\"name\":\"g\",\"arguments\":".to_vec(), 1)];
        let call_openings = call_heads.iter().map(|(head, _)| head.clone()).collect();
        let mut layout = Layout { whole: None, call_heads, call_openings, rules };
        let validated = |layout: &Layout, text: &str| {
            let mut tracker = DocumentTracker::new(layout);
            text.bytes().for_each(|byte| tracker.push(layout, &[byte]));
            let all = RefCell::new(Vec::new());
            let validate = |schema: &str, documents: &[String]| {
                all.borrow_mut().push((schema.to_owned(), documents.concat()));
                Ok(vec![Vec::new(); documents.len()])
            };
            tracker.validate_ended(layout, true, &validate).unwrap();
            all.into_inner()
        };
        let pair = |schema: &str, text: &str| (schema.to_owned(), text.to_owned());
        let text = r#"<f>{"a":{}}</f><f>[1]</f>{"name":"g","arguments":{}}"#;
        assert_eq!(validated(&layout, text), [pair("0", r#"{"a":{}}"#), pair("0", "[1]"), pair("1", "{}")]);
        // The answer is a call or one document.
        layout.whole = Some((Vec::new(), 0));
        assert_eq!(validated(&layout, r#"{"name":"g","arguments":{}}"#), [pair("1", "{}")]);
        assert_eq!(validated(&layout, r#"{"name":"g"}"#), [pair("0", r#"{"name":"g"}"#)]);
        assert_eq!(validated(&layout, "12"), [pair("0", "12")]);
    }
}
