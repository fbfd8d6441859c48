//! Checks of an answer beyond its grammar: no key twice, and the schema as an independent validator reads it.
//!
//! A grammar is made from a schema by one piece of code and an answer is validated by another, so an error in one of them shows
//! as a refusal and not as an answer that is wrong. Where a grammar allows more than its schema does (`uniqueItems`), the checks
//! take away the tokens that would break it, as soon as nothing that follows could mend it.
//!
//! What must not be in here: how a mask is computed, and the process that validates ([`crate::sandbox`]).

mod breach;
mod candidates;
mod document;

pub(crate) use self::breach::broken;
use self::breach::{beyond_repair, open_values};
use self::candidates::Candidates;
use self::document::Document;
use crate::depth::Depth;
use crate::sandbox::Breach;
use crate::shape::Shape;

/// A schema that documents of an answer must satisfy.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Rule {
    /// The tool whose arguments the documents are. None for another document.
    pub tool: Option<String>,
    /// The schema, as JSON text. None where only keys are checked.
    pub schema: Option<String>,
    /// The grammar allows nothing that the schema does not.
    pub exact: bool,
}

/// Where the documents of an answer stand.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layout {
    /// The whole answer behind this text is one document.
    pub whole: Option<(Vec<u8>, usize)>,
    /// A document begins behind each of these texts.
    pub heads: Vec<(Vec<u8>, usize)>,
    /// What an answer begins with that is calls and no document, where it may be either.
    pub openings: Vec<Vec<u8>>,
    pub rules: Vec<Rule>,
}

impl Layout {
    /// Whether documents are validated before they end.
    pub fn is_validated_on_the_way(&self) -> bool {
        self.rules.iter().any(|rule| !rule.exact && rule.schema.is_some())
    }

    /// How deep the schemas of its documents go.
    pub fn depth(&self) -> Depth {
        self.rules.iter().filter_map(|rule| rule.schema.as_deref()).map(Depth::of_json).max().unwrap_or_default()
    }
}

/// Validates documents against a schema: for each of them, how it breaks it. An error says why that cannot be done.
pub(crate) type Validate<'a> = dyn Fn(&str, &[String]) -> Result<Vec<Vec<Breach>>, String> + 'a;

/// What has been written of one answer.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    text: Vec<u8>,
    document: Option<Document>,
    /// A document has begun: the answer as a whole is none any more.
    begun: bool,
    /// Documents that have ended and were not validated before.
    due: Vec<(usize, String)>,
    /// Documents that were found valid for the token that would end them.
    valid: Vec<String>,
}

/// What is taken away from a mask.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Away {
    pub tokens: Vec<u32>,
    /// The ends, too.
    pub ends: bool,
    /// Tokens behind which a value must go on, because it would break a check as it stands. Whether it can is for the grammar to say.
    pub doubtful: Vec<u32>,
}

impl Reading {
    pub fn new(layout: &Layout) -> Self {
        let mut reading = Self { text: Vec::new(), document: None, begun: false, due: Vec::new(), valid: Vec::new() };
        reading.begin(layout);
        reading
    }

    /// Takes the bytes of a token.
    pub fn take(&mut self, layout: &Layout, bytes: &[u8]) {
        for byte in bytes {
            self.text.push(*byte);
            if self.document.is_some() {
                self.grow(self.text.len());
            } else {
                self.begin(layout);
            }
        }
    }

    /// The document takes the byte before `until`.
    fn grow(&mut self, until: usize) {
        let Some(document) = &mut self.document else { return };
        if document.take(&self.text[..until]) {
            let text = String::from_utf8_lossy(&self.text[document.start..until]).into_owned();
            if !self.valid.contains(&text) {
                self.due.push((document.rule, text));
            }
            self.document = None;
        }
    }

    /// Whether a document is being written.
    pub fn is_in_document(&self) -> bool {
        self.document.as_ref().is_some_and(|document| self.text.len() > document.start)
    }

    /// Whether checks may leave nothing to follow here although the grammar would: in a document of which the grammar allows too much, or in
    /// a key beside others.
    pub fn may_get_stuck(&self, layout: &Layout) -> bool {
        self.document.as_ref().is_some_and(|document| {
            let rule = &layout.rules[document.rule];
            let keys = document.keys.last().is_some_and(|keys| !keys.is_empty());
            !rule.exact && rule.schema.is_some() || keys && document.shape.expects_key()
        })
    }

    /// Begins a document if it begins here, or is found to have begun.
    fn begin(&mut self, layout: &Layout) {
        let head =
            layout.heads.iter().find(|(head, _)| self.text.ends_with(head)).map(|(_, rule)| (self.text.len(), *rule));
        let calls = || layout.openings.iter().any(|opening| opening.starts_with(&self.text));
        let whole =
            layout.whole.as_ref().filter(|(prefix, _)| !self.begun && self.text.starts_with(prefix) && !calls());
        let Some((start, rule)) = head.or(whole.map(|(prefix, rule)| (prefix.len(), *rule))) else { return };
        self.begun = true;
        self.document = Some(Document { rule, start, shape: Shape::default(), key: 0, keys: Vec::new() });
        (start + 1..=self.text.len()).for_each(|until| self.grow(until));
    }

    /// Validates what has ended since the last time, and what ends with the answer (`at_end`).
    pub fn settle(&mut self, layout: &Layout, at_end: bool, validate: &Validate<'_>) -> Result<(), String> {
        let rest = self.document.as_ref().filter(|_| at_end).map(|document| (document.rule, self.rest(document)));
        for (rule, document) in std::mem::take(&mut self.due).into_iter().chain(rest) {
            let Some(schema) = &layout.rules[rule].schema else { continue };
            if let Some(breach) = validate(schema, &[document])?.pop().and_then(|breaches| breaches.into_iter().next())
            {
                return Err(broken(&breach));
            }
        }
        Ok(())
    }

    fn rest(&self, document: &Document) -> String {
        String::from_utf8_lossy(&self.text[document.start..]).into_owned()
    }

    /// Takes from a mask the tokens that would break a check. `tokens` are those that may end anything in JSON, `allowed` says
    /// which of them the mask has, `end` whether it has an end.
    pub fn refine(
        &mut self,
        layout: &Layout,
        tokens: &mut dyn Iterator<Item = (u32, &[u8])>,
        end: bool,
        validate: &Validate<'_>,
    ) -> Result<Away, String> {
        self.settle(layout, false, validate)?;
        self.valid.clear();
        let Some(document) = &self.document else { return Ok(Away::default()) };
        let rule = &layout.rules[document.rule];
        let schema = rule.schema.as_deref();
        let mut away = Vec::new();
        // Texts to validate, with the tokens that lead there.
        let (mut whole, mut parts, mut maybe) = (Candidates::default(), Candidates::default(), Candidates::default());
        for (id, bytes) in tokens {
            let outcome = document.outcome(&self.text, bytes);
            if outcome.repeats {
                away.push(id);
                continue;
            }
            if schema.is_none() || rule.exact {
                continue;
            }
            let text = |until: usize| [&self.text[document.start..], &bytes[..until]].concat();
            let fits = match (outcome.ends, outcome.value) {
                (Some(until), _) => whole.add(id, text(until)),
                (None, Some((until, shape))) => {
                    let closed: Vec<u8> = text(until).into_iter().chain(shape.closers()).collect();
                    parts.add_open(id, closed, shape.depth())
                }
                (None, None) => true,
            };
            if let Some(shape) = outcome.open_end {
                let closed: Vec<u8> = text(bytes.len()).into_iter().chain(shape.closers()).collect();
                maybe.add_open(id, closed, shape.depth());
            }
            if !fits {
                away.push(id);
            }
        }
        let (mut ends, mut doubtful) = (false, Vec::new());
        if let Some(schema) = schema {
            if end {
                let breaches = validate(schema, &[self.rest(document)])?;
                ends = breaches.first().is_some_and(|breaches| !breaches.is_empty());
            }
            self.valid = whole.judge(schema, validate, &mut away, |breaches, _, _| breaches.is_empty())?;
            let whole_yet = |breaches: &[Breach], text: &str, depth| {
                let open = open_values(text, depth);
                !breaches.iter().any(|breach| beyond_repair(breach, &open))
            };
            parts.judge(schema, validate, &mut away, whole_yet)?;
            maybe.judge(schema, validate, &mut doubtful, whole_yet)?;
            doubtful.retain(|token| !away.contains(token));
        }
        Ok(Away { tokens: away, ends, doubtful })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::{Away, Breach, Layout, Reading, Rule};

    fn layout(exact: bool) -> Layout {
        let rules = vec![Rule { tool: None, schema: Some("{}".into()), exact }];
        Layout { whole: Some((Vec::new(), 0)), rules, ..Layout::default() }
    }

    fn breach(keyword: &str, instance: &str, schema: &str) -> Breach {
        Breach { keyword: keyword.into(), instance: instance.into(), schema: schema.into() }
    }

    /// The tokens that are taken away behind `text`, where documents that `bad` names break a rule of the whole.
    fn away(text: &str, tokens: &[&str], bad: &[&str]) -> (Vec<u32>, Vec<String>) {
        let layout = layout(false);
        let mut reading = Reading::new(&layout);
        reading.take(&layout, text.as_bytes());
        let asked = RefCell::new(Vec::new());
        let validate = |_: &str, documents: &[String]| {
            asked.borrow_mut().extend(documents.to_vec());
            let judge = |text: &String| bad.contains(&text.as_str()).then(|| breach("uniqueItems", "", "/uniqueItems"));
            Ok(documents.iter().map(|text| judge(text).into_iter().collect()).collect())
        };
        let mut tokens = (0..).zip(tokens.iter().map(|token| token.as_bytes()));
        let Away { tokens: mut away, ends, .. } = reading.refine(&layout, &mut tokens, false, &validate).unwrap();
        assert!(!ends);
        away.sort_unstable();
        (away, asked.into_inner())
    }

    #[test]
    fn a_key_is_not_written_twice() {
        let tokens = ["\"", "b\"", "\": 1, \"x", "\\u0061\""];
        assert_eq!(away(r#"{"a": 1, "b": 2, "a"#, &tokens, &[]).0, [0, 2]);
        // The object inside has keys of its own, and the one outside gets its own back.
        assert_eq!(away(r#"{"a": {"b": 1, "#, &["\"a\"", "\"b\"", "\"\\u0062\""], &[]).0, [1, 2]);
        assert_eq!(away(r#"{"a": {"b": 1"#, &["}, \"b\"", "}, \"a\""], &[]).0, [1]);
        // A value is no key.
        assert_eq!(away(r#"{"a": 1, "b": "a"#, &["\""], &[]).0, Vec::<u32>::new());
    }

    #[test]
    fn a_token_that_would_end_an_invalid_document_is_taken_away() {
        let (gone, asked) = away(r#"{"a": 1"#, &["}", "0}", ","], &[r#"{"a": 1}"#]);
        assert_eq!(asked, [r#"{"a": 1}"#, r#"{"a": 10}"#, r#"{"a": 1}"#]);
        assert_eq!(away(r#"["a", "a"#, &["\"", "b\""], &[r#"["a", "a"]"#]).0, [0]);
        // What may still grow is judged by what cannot be mended: an array whose items repeat.
        assert_eq!(gone, [0, 2]);
        assert_eq!(away("[1, 1", &[",", "2,", "]"], &["[1, 1]"]).0, [0, 2]);
    }

    #[test]
    fn a_number_that_must_go_on_is_doubtful() {
        let layout = layout(false);
        let mut reading = Reading::new(&layout);
        reading.take(&layout, b"[1, ");
        let validate = |_: &str, documents: &[String]| {
            let judge = |text: &String| (text == "[1, 1]").then(|| breach("uniqueItems", "", "/uniqueItems"));
            Ok(documents.iter().map(|text| judge(text).into_iter().collect()).collect())
        };
        let tokens: [(u32, &[u8]); 3] = [(0, b"1"), (1, b"2"), (2, b"1]")];
        let away = reading.refine(&layout, &mut tokens.into_iter(), false, &validate).unwrap();
        assert_eq!(away, Away { tokens: vec![2], ends: false, doubtful: vec![0] });
    }

    #[test]
    fn documents_are_found_behind_their_heads() {
        let rules = ["0", "1"].map(|schema| Rule { tool: None, schema: Some(schema.into()), exact: true }).into();
        let heads = vec![(b"<f>".to_vec(), 0), (b"{\"name\":\"g\",\"arguments\":".to_vec(), 1)];
        let openings = heads.iter().map(|(head, _)| head.clone()).collect();
        let mut layout = Layout { whole: None, heads, openings, rules };
        let told = |layout: &Layout, text: &str| {
            let mut reading = Reading::new(layout);
            text.bytes().for_each(|byte| reading.take(layout, &[byte]));
            let all = RefCell::new(Vec::new());
            let validate = |schema: &str, documents: &[String]| {
                all.borrow_mut().push((schema.to_owned(), documents.concat()));
                Ok(vec![Vec::new(); documents.len()])
            };
            reading.settle(layout, true, &validate).unwrap();
            all.into_inner()
        };
        let pair = |schema: &str, text: &str| (schema.to_owned(), text.to_owned());
        let text = r#"<f>{"a":{}}</f><f>[1]</f>{"name":"g","arguments":{}}"#;
        assert_eq!(told(&layout, text), [pair("0", r#"{"a":{}}"#), pair("0", "[1]"), pair("1", "{}")]);
        // The answer is a call or a document of its own.
        layout.whole = Some((Vec::new(), 0));
        assert_eq!(told(&layout, r#"{"name":"g","arguments":{}}"#), [pair("1", "{}")]);
        assert_eq!(told(&layout, r#"{"name":"g"}"#), [pair("0", r#"{"name":"g"}"#)]);
        assert_eq!(told(&layout, "12"), [pair("0", "12")]);
    }
}
