//! The state that all clients share: the server, its golden answers and the results so far. It also makes the clients' questions.

use std::sync::Arc;

use serde_json::json;

use super::endpoint::Endpoint;
use super::faults::FaultLog;
use super::golden_answers::GoldenAnswers;
use super::keep::Keep;
use super::question::{Kind, Question};
use super::schemas::Case;
use super::tally::Tally;
use crate::prompts::{Random, Scale, words};

/// Tokens of a marathon's answer, if the context allows them.
const MARATHON_TOKENS: usize = 800;

/// The state that all clients share.
pub struct Setting {
    /// The server.
    pub endpoint: Endpoint,
    /// Words per token.
    pub scale: Scale,
    /// Fixed questions and their answers.
    pub golden_answers: GoldenAnswers,
    /// Tokens of the longest prompts.
    pub prompt_tokens: usize,
    /// Tokens of the longest answers.
    pub output_tokens: usize,
    /// Tokens that prompt and answer may have together.
    pub context: usize,
    /// The faults around the server.
    pub fault_log: Arc<FaultLog>,
    /// A sample of answers, to be asked for again at the end.
    pub keep: Keep,
    /// Schemas and requests from files.
    pub schemas: Vec<Case>,
    /// Counted outcomes.
    pub tally: Tally,
}

impl Setting {
    fn words(&self, random: &mut Random) -> String {
        let tokens = random.between(1, self.prompt_tokens as u64) as usize;
        words(random.next(), self.scale.words(tokens))
    }

    /// Returns a text to be continued. Half of the requests are greedy, the others sample. Half of them disable speculative decoding,
    /// where the server allows it.
    pub fn completion(&self, random: &mut Random) -> Question {
        let tokens = random.between(1, self.output_tokens as u64);
        let temperature = random.below(2);
        let mut body = json!({
            "model": self.endpoint.model, "prompt": self.words(random), "max_tokens": tokens, "temperature": temperature,
            "seed": random.below(1 << 40), "ignore_eos": random.below(2) == 0
        });
        if self.golden_answers.drafts && random.below(2) == 0 {
            body["mtp"] = false.into();
        }
        Question { path: "/v1/completions", body }
    }

    /// Returns a text with a long beginning that other clients send too.
    pub fn shared(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        let common = words(random.below(4), self.scale.words(self.prompt_tokens * 3 / 4));
        question.body["prompt"] = (common + &words(random.next(), 5)).into();
        question
    }

    /// Returns a request for a long stream. Such streams exhaust servers that never free a stream's memory.
    pub fn marathon(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        question.body["max_tokens"] = MARATHON_TOKENS.min(self.context / 2).into();
        question.body["ignore_eos"] = true.into();
        question
    }

    /// Returns a request for several answers with log-probabilities, sometimes of the prompt too.
    pub fn heavy(&self, random: &mut Random) -> Question {
        let mut question = self.completion(random);
        question.body["n"] = random.between(2, 8).into();
        question.body["logprobs"] = 5.into();
        if random.below(2) == 0 {
            question.body["prompt_logprobs"] = 5.into();
        }
        question
    }

    /// Returns a [`Self::completion`] as a conversation.
    pub fn chat(&self, random: &mut Random) -> Question {
        let Question { mut body, .. } = self.completion(random);
        let text = body["prompt"].take();
        if let Some(fields) = body.as_object_mut() {
            fields.remove("prompt");
        }
        body["messages"] = json!([{"role": "user", "content": text}]);
        Question { path: "/v1/chat/completions", body }
    }

    /// Returns a new question of this kind.
    pub fn ask_for(&self, kind: Kind, random: &mut Random) -> Question {
        let text = self.words(random);
        let mut question = kind.question(&self.endpoint.model, random, text);
        if self.golden_answers.drafts && random.below(2) == 0 {
            question.body["mtp"] = false.into();
        }
        question
    }

    /// Returns any question, for clients that leave: some leave during image encoding or while a grammar is compiled.
    pub fn anything(&self, random: &mut Random) -> Question {
        let special = [Kind::Image, Kind::Tools, Kind::Structured][random.below(3) as usize];
        match random.below(2) == 0 && self.golden_answers.knows(special) {
            true => self.ask_for(special, random),
            false => self.completion(random),
        }
    }
}
