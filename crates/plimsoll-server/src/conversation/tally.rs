//! Token counts of a request over all turns of the model.

use plimsoll_engine::Delta;
use serde::Serialize;

/// Token counts of the whole request.
pub(super) struct Tally {
    prompt_tokens: u64,
    completion_tokens: u64,
    /// Cached prompt tokens of each prompt's first choice. Other choices share these pages, so they are not counted
    /// again.
    cached: Vec<u32>,
    /// Drafted and accepted tokens of each choice.
    drafts: Vec<(u32, u32)>,
    n: usize,
    /// Cached, drafted and accepted tokens of earlier turns.
    earlier: (u64, u64, u64),
}

impl Tally {
    /// For `choices` choices, `n` of each prompt.
    pub fn new(prompt_tokens: u64, choices: usize, n: usize) -> Self {
        Self {
            prompt_tokens,
            completion_tokens: 0,
            cached: vec![0; choices.div_ceil(n)],
            drafts: vec![(0, 0); choices],
            n,
            earlier: (0, 0, 0),
        }
    }

    /// Begins another turn. Its tokens are added to those of earlier turns.
    pub fn turn(&mut self, prompt_tokens: u64, choices: usize, n: usize) {
        let usage = self.usage();
        let speculation = usage.speculation.map_or((0, 0), |of| (of.drafted, of.accepted));
        let earlier = (usage.prompt_tokens_details.cached_tokens, speculation.0, speculation.1);
        let completion_tokens = self.completion_tokens;
        let turn = Self::new(self.prompt_tokens + prompt_tokens, choices, n);
        *self = Self { completion_tokens, earlier, ..turn };
    }

    pub fn add(&mut self, choice: usize, delta: &Delta) {
        self.completion_tokens += delta.tokens.len() as u64;
        if choice.is_multiple_of(self.n) {
            self.cached[choice / self.n] = delta.cached_tokens;
        }
        self.drafts[choice] = (delta.drafted_tokens, delta.accepted_tokens);
    }

    pub fn usage(&self) -> Usage {
        let drafts = |of: fn(&(u32, u32)) -> u32| self.drafts.iter().map(|both| u64::from(of(both))).sum::<u64>();
        let (cached, drafted, accepted) = self.earlier;
        let (drafted, accepted) = (drafted + drafts(|both| both.0), accepted + drafts(|both| both.1));
        let speculation = Speculation { drafted, accepted };
        let cached_tokens = cached + self.cached.iter().map(|n| u64::from(*n)).sum::<u64>();
        Usage {
            speculation: (speculation.drafted > 0).then_some(speculation),
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
        }
    }
}

/// OpenAI's `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptDetails,
    /// Plimsoll's own field; only with speculative decoding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
}

/// Draft tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Speculation {
    /// Draft tokens that the model verified.
    pub drafted: u64,
    /// Draft tokens that were accepted.
    pub accepted: u64,
}

/// OpenAI's `prompt_tokens_details`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PromptDetails {
    pub cached_tokens: u64,
}
