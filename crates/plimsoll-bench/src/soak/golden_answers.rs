//! Golden answers: fixed questions of all kinds, answered while the server has nothing else to do.
//!
//! A kind is a sort of request that a server may not support (images, tools, structured output). Unsupported kinds are left out of the
//! soak and named in the verdict.

use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::Value;

use super::ask::{Reading, ask};
use super::endpoint::Endpoint;
use super::outcome::Outcome;
use super::question::{Kind, Question};
use crate::client::Target;
use crate::prompts::{Random, Scale, words};

const WITHIN: Duration = Duration::from_secs(300);

/// All kinds, with the number of recorded questions of each. A new kind needs a row here, an arm in [`Kind::question`] and a client
/// profile that uses it.
const KINDS: [(Kind, usize); 5] =
    [(Kind::Text, 8), (Kind::Chat, 3), (Kind::Image, 4), (Kind::Tools, 2), (Kind::Structured, 3)];

/// A question and its answer.
#[derive(Clone, Debug)]
struct Page {
    kind: Kind,
    question: Question,
    answer: String,
}

/// The questions with their answers.
#[derive(Clone, Debug)]
pub struct GoldenAnswers {
    pages: Vec<Page>,
    /// Kinds that the server does not support, with its error.
    pub unknown: Vec<(Kind, String)>,
    /// Whether the server lets a request disable speculative decoding (`mtp`).
    pub drafts: bool,
}

impl GoldenAnswers {
    /// Records the answers. Each question is asked three times (whole, streamed, without speculative decoding), and all answers must be
    /// equal:
    /// the second one may come from the prefix cache.
    pub async fn record(target: &Target, model: &str, scale: Scale, longest: usize) -> Result<Self> {
        let mut golden_answers = Self { pages: Vec::new(), unknown: Vec::new(), drafts: true };
        for (kind, count) in KINDS {
            for i in 0..count {
                // Lengths from very short to the longest, none a multiple of a page.
                let tokens = (3 + i * longest / count).max(3);
                let seed = 0x60_1d + i as u64;
                let question = kind.question(model, &mut Random::new(seed), words(seed, scale.words(tokens)));
                match golden_answers.three_times(target, &question).await? {
                    Ok(answer) => golden_answers.pages.push(Page { kind, question, answer }),
                    // Every server must accept the text questions. It may refuse another kind at its first question.
                    Err(words) if i == 0 && kind != Kind::Text && words.starts_with("Bad(\"4") => {
                        golden_answers.unknown.push((kind, words));
                        break;
                    }
                    Err(words) => bail!("{kind:?} {i}, asked while the server was idle: {words}"),
                }
            }
        }
        Ok(golden_answers)
    }

    /// The number of questions.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether the server supports this kind.
    pub fn knows(&self, kind: Kind) -> bool {
        self.unknown.iter().all(|(unknown, _)| *unknown != kind)
    }

    /// Chooses a question at random, of this kind if one is given. Returns its index.
    pub fn choose(&self, kind: Option<Kind>, random: &mut Random) -> usize {
        let of_kind = |page: &&Page| kind.is_none_or(|kind| page.kind == kind);
        let at = random.below(self.pages.iter().filter(of_kind).count() as u64) as usize;
        let chosen = self.pages.iter().enumerate().filter(|(_, page)| of_kind(page)).nth(at);
        chosen.map_or(0, |(index, _)| index)
    }

    /// Asks a question again, with or without speculative decoding, streamed or not, and compares the answer.
    pub async fn compare(&self, endpoint: &Endpoint, index: usize, stream: bool, drafts: bool) -> Result<Outcome> {
        let Page { kind, question, answer } = &self.pages[index];
        let mut question = question.clone();
        if !drafts && self.drafts {
            question.body["mtp"] = false.into();
        }
        let reading = Reading { stream, patience: endpoint.patience, slowly: None };
        Ok(match ask(&endpoint.target, &question, reading).await? {
            Ok(said) => same(&format!("{kind:?} {index}"), &said, answer),
            Err(outcome) => outcome,
        })
    }

    /// Asks all questions again, one after the other. Returns a description of each difference.
    pub async fn compare_all(&self, endpoint: &Endpoint) -> Vec<String> {
        let mut findings = Vec::new();
        for index in 0..self.len() {
            match self.compare(endpoint, index, index % 2 == 1, index % 3 != 0).await {
                Ok(Outcome::Same) => {}
                other => findings.push(format!("{other:?}")),
            }
        }
        findings
    }

    async fn three_times(&mut self, target: &Target, question: &Question) -> Result<Result<String, String>> {
        let once = async |question: &Question, stream| {
            let reading = Reading { stream, patience: WITHIN, slowly: None };
            anyhow::Ok(ask(target, question, reading).await?.map_err(|outcome| format!("{outcome:?}")))
        };
        let first = match once(question, false).await? {
            Ok(first) => first,
            Err(words) => return Ok(Err(words)),
        };
        let mut plain = question.clone();
        plain.body["mtp"] = false.into();
        let mut others = vec![(once(question, true).await?, "in pieces")];
        if self.drafts {
            let said = once(&plain, false).await?;
            // Servers without the field `mtp` may answer 400.
            self.drafts = !said.as_ref().is_err_and(|words| words.contains("400"));
            others.extend(self.drafts.then_some((said, "without drafts")));
        }
        for (said, how) in others {
            if said.as_ref() != Ok(&first) {
                bail!(
                    "two answers while the server was idle: {first:?}, and {how} {said:?}; to {}",
                    brief(&question.body)
                );
            }
        }
        Ok(Ok(first))
    }
}

/// Compares an answer with the expected one.
pub fn same(name: &str, said: &str, expected: &str) -> Outcome {
    if said == expected {
        return Outcome::Same;
    }
    let same = said.chars().zip(expected.chars()).take_while(|(a, b)| a == b).count();
    Outcome::Changed(format!("{name} differs after {same} characters: {said:?} instead of {expected:?}"))
}

/// The beginning of a body.
fn brief(body: &Value) -> String {
    body.to_string().chars().take(300).collect()
}
