//! Traces: the sizes and times of a server's requests, without their content. One JSON object a line: a [`Head`], then a [`Line`] for each
//! request, in the order in which they ended.
//!
//! Prompts are lengths. Each block of tokens has a number; prompts with the same number are equal up to the end of that block. Memory and
//! time depend on nothing else. The numbers come from a hash with a key that is drawn for each trace and never written down.

mod blinds;
mod import;

use std::borrow::Cow;
use std::io::BufRead;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use blinds::Blinds;
pub use import::{burst_gpt, mooncake};

/// The version of the format.
pub const VERSION: u32 = 1;

/// Tokens of a block in Plimsoll's own traces.
pub const BLOCK_TOKENS: u32 = 64;

/// The longest line that is read.
const LINE_BYTES_MAX: usize = 16 << 20;

/// The most bytes that one trace may take in memory.
const TRACE_BYTES_MAX: usize = 1 << 30;

/// The longest prompt, in tokens.
const PROMPT_TOKENS_MAX: u32 = 1 << 24;

/// The most completions of one prompt.
const CHOICES_MAX: u32 = 1 << 10;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`VERSION`].
    pub plimsoll_trace: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
}

impl Default for Head {
    fn default() -> Self {
        Self { plimsoll_trace: VERSION, block_tokens: BLOCK_TOKENS }
    }
}

/// One image or video.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Medium {
    /// `image` or `video`.
    pub kind: Cow<'static, str>,
    /// Number of its tokens.
    pub tokens: u32,
    /// Index of its first token in the prompt.
    pub first: u32,
    /// A number that equal media share.
    pub key: u64,
}

/// One prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prompt {
    /// Number of its tokens.
    pub tokens: u32,
    /// A number for each block, of which the last can be shorter. Prompts with the same number are equal up to the end of that block.
    pub blocks: Vec<u64>,
    /// The images and videos in it. A replay puts made-up text of the same length in their place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub media: Vec<Medium>,
    /// The token ids, where content is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<u32>>,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Milliseconds since the trace began.
    pub at_ms: u64,
    /// The API of the request.
    pub api: Cow<'static, str>,
    /// The model that was asked, where the server has several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Whether it was streamed.
    pub stream: bool,
    /// Its prompts.
    pub prompts: Vec<Prompt>,
    /// Completions of each prompt.
    pub n: u32,
    /// The most tokens of each completion; `None`: all that the context has left.
    pub max_tokens: Option<u32>,
    /// Sampling temperature.
    pub temperature: f32,
    /// Nucleus sampling probability.
    pub top_p: f32,
    /// Number of candidates to sample from.
    pub top_k: i64,
    /// Alternatives that are reported for each token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u32>,
    /// The same for each token of the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<u32>,
    /// Number of stop strings.
    pub stop: u32,
    /// Whether the request had a grammar.
    pub form: bool,
    /// A number that requests share if they can share pages.
    pub salt: u64,
    /// Number of generated tokens, over all completions.
    pub output: u64,
    /// The outcome: `finished`, `aborted`, `cancelled`, `timeout`, `shutdown`, `failed`.
    pub end: Cow<'static, str>,
    /// Milliseconds to the first token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_ms: Option<u64>,
    /// Milliseconds to the end.
    pub ms: u64,
}

impl Line {
    /// A greedy request of one prompt that was served to its end, for traces without other fields.
    pub fn plain(at_ms: u64, prompt: Prompt, output: u32) -> Self {
        Self {
            at_ms,
            api: "completions".into(),
            model: None,
            stream: true,
            prompts: vec![prompt],
            n: 1,
            max_tokens: Some(output),
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            logprobs: None,
            prompt_logprobs: None,
            stop: 0,
            form: false,
            salt: 0,
            output: output.into(),
            end: "finished".into(),
            first_ms: None,
            ms: 0,
        }
    }

    /// Whether its client left before the end.
    pub fn left(&self) -> bool {
        matches!(&*self.end, "aborted" | "cancelled")
    }

    /// Tokens of each completion, estimated from the sum.
    pub fn output_each(&self) -> u64 {
        self.output.div_ceil(u64::from(self.n).max(1) * self.prompts.len().max(1) as u64)
    }
}

/// A whole trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// The first line.
    pub head: Head,
    /// The requests, in the order in which they arrived.
    pub lines: Vec<Line>,
    /// The number of the last line, if its writer was stopped before its end. The line is left out. A last line of CSV without a line break
    /// is left out too, because it can have been cut in its last cell.
    pub torn: Option<usize>,
}

/// The version, which is read before the other fields of the first line.
#[derive(Deserialize)]
struct Version {
    plimsoll_trace: u32,
}

/// The reason why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// A line has a wrong format or value.
    #[error("line {line}: {why}")]
    Line {
        /// The line's number, from 1.
        line: usize,
        /// The error.
        why: String,
    },
    /// The trace exceeds the memory limit of a trace.
    #[error("line {line}: the trace takes more than {TRACE_BYTES_MAX} bytes up to here; split it")]
    TooLarge {
        /// The first line beyond the limit.
        line: usize,
    },
}

impl Trace {
    /// Reads one of Plimsoll's own traces.
    pub fn read(file: impl BufRead) -> Result<Self, TraceError> {
        let mut head = None;
        let mut lines = Lines::default();
        let torn = each_line(file, unfinished, |number, text| {
            let wrong = |why: String| TraceError::Line { line: number, why };
            let bad = |error: serde_json::Error| wrong(error.to_string());
            if head.is_none() {
                let no_trace =
                    |_| wrong("this is not a trace of plimsoll: its first line has no `plimsoll_trace`".into());
                let Version { plimsoll_trace: version } = serde_json::from_str(text).map_err(no_trace)?;
                if version != VERSION {
                    return Err(wrong(format!(
                        "the trace has version {version}; this plimsoll reads version {VERSION}"
                    )));
                }
                let first: Head = serde_json::from_str(text).map_err(bad)?;
                if first.block_tokens == 0 {
                    return Err(wrong("`block_tokens` is 0".into()));
                }
                head = Some(first);
                return Ok(());
            }
            let line: Line = serde_json::from_str(text).map_err(bad)?;
            line.prompts.iter().try_for_each(|prompt| check_prompt(number, prompt, line.n))?;
            lines.push(number, line)
        })?;
        let head = head.ok_or(TraceError::Line { line: 1, why: "the file is empty".into() })?;
        Ok(Self { torn, ..Self::new(head, lines) })
    }

    fn new(head: Head, lines: Lines) -> Self {
        let mut lines = lines.all;
        lines.sort_by_key(|line| line.at_ms);
        Self { head, lines, torn: None }
    }

    /// Token ids for a prompt: the recorded ones, or made-up ones below `vocab` that are equal where the recorded prompts were.
    pub fn ids(&self, prompt: &Prompt, vocab: u32) -> Vec<u32> {
        if let Some(ids) = &prompt.ids {
            return ids.clone();
        }
        let id = |at: u32| {
            let block = prompt.blocks.get((at / self.head.block_tokens) as usize).copied().unwrap_or_default();
            let mixed = (block ^ u64::from(at) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            ((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33) as u32 % vocab.max(1)
        };
        (0..prompt.tokens).map(id).collect()
    }
}

/// The requests read so far, and the bytes that they take.
#[derive(Default)]
struct Lines {
    all: Vec<Line>,
    bytes: usize,
}

impl Lines {
    fn push(&mut self, number: usize, line: Line) -> Result<(), TraceError> {
        let of = |prompt: &Prompt| {
            let ids = prompt.ids.as_ref().map_or(0, Vec::len) * size_of::<u32>();
            size_of::<Prompt>() + size_of_val(&*prompt.blocks) + size_of_val(&*prompt.media) + ids
        };
        self.bytes += size_of::<Line>() + line.prompts.iter().map(of).sum::<usize>();
        if self.bytes > TRACE_BYTES_MAX {
            return Err(TraceError::TooLarge { line: number });
        }
        self.all.push(line);
        Ok(())
    }
}

/// Refuses prompts that no server could have been asked for.
fn check_prompt(number: usize, prompt: &Prompt, n: u32) -> Result<(), TraceError> {
    if let Some(ids) = prompt.ids.as_ref().filter(|ids| ids.len() != prompt.tokens as usize) {
        let why = format!("a prompt of {} tokens that has {} ids", prompt.tokens, ids.len());
        return Err(TraceError::Line { line: number, why });
    }
    check(number, prompt.tokens, n)
}

fn check(number: usize, tokens: u32, n: u32) -> Result<(), TraceError> {
    let bad = |why| Err(TraceError::Line { line: number, why });
    if tokens > PROMPT_TOKENS_MAX {
        return bad(format!("a prompt of {tokens} tokens; {PROMPT_TOKENS_MAX} at most are read"));
    }
    if n > CHOICES_MAX {
        return bad(format!("{n} completions of one prompt; {CHOICES_MAX} at most are read"));
    }
    Ok(())
}

/// Whether a text is the beginning of a JSON value.
fn unfinished(text: &str) -> bool {
    // Parsed as a value: as a skipped field, "0." would be a syntax error and not the beginning of a number.
    serde_json::from_str::<serde_json::Value>(text).is_err_and(|error| error.is_eof())
}

/// Calls `take` with the number and the text of every line that is not empty. A line longer than the limit is an error. Returns the number
/// of the last line if no line break ends it and `torn` is true for it.
fn each_line(
    mut file: impl BufRead,
    torn: impl Fn(&str) -> bool,
    mut take: impl FnMut(usize, &str) -> Result<(), TraceError>,
) -> Result<Option<usize>, TraceError> {
    let mut text = Vec::new();
    for number in 1.. {
        text.clear();
        let mut limited = std::io::Read::take(&mut file, LINE_BYTES_MAX as u64 + 1);
        let read = limited.read_until(b'\n', &mut text)?;
        if read == 0 {
            break;
        }
        if read > LINE_BYTES_MAX {
            return Err(TraceError::Line { line: number, why: format!("longer than {LINE_BYTES_MAX} bytes") });
        }
        // The first line has the format: without it the trace cannot be read.
        let may_be_torn = number > 1 && text.last() != Some(&b'\n');
        let text = match str::from_utf8(&text) {
            Ok(text) => text.trim(),
            // The text ends in the middle of a character.
            Err(error) if may_be_torn && error.error_len().is_none() => return Ok(Some(number)),
            Err(error) => return Err(TraceError::Line { line: number, why: error.to_string() }),
        };
        if text.is_empty() {
            continue;
        }
        if may_be_torn && torn(text) {
            return Ok(Some(number));
        }
        take(number, text)?;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lines: &[Line]) -> String {
        let head = serde_json::to_string(&Head::default()).unwrap();
        lines.iter().fold(head, |text, line| text + "\n" + &serde_json::to_string(line).unwrap())
    }

    #[test]
    fn what_is_written_is_read_in_the_order_of_arrival() {
        let line = |at| Line::plain(at, Prompt { tokens: 3, blocks: vec![7], ..Prompt::default() }, 5);
        let trace = Trace::read(text(&[line(9), line(2)]).as_bytes()).unwrap();
        assert_eq!((trace.head.block_tokens, &trace.lines), (BLOCK_TOKENS, &vec![line(2), line(9)]));
    }

    #[test]
    fn prompts_begin_alike_where_they_did() {
        let blinds = Blinds::default();
        let first: Vec<u32> = (0..200).collect();
        let mut second = first.clone();
        second[150] = 999;
        let prompts = [&first, &second].map(|ids| blinds.prompt(ids, &[], false));
        assert_eq!(prompts[0].blocks[..2], prompts[1].blocks[..2]);
        assert!(prompts[0].blocks[2] != prompts[1].blocks[2] && prompts[0].blocks[3] != prompts[1].blocks[3]);
        let trace = Trace { head: Head::default(), lines: vec![], torn: None };
        let made = [0, 1].map(|i| trace.ids(&prompts[i], 50));
        assert_eq!(made[0].len(), 200);
        assert!(made[0][..128] == made[1][..128] && made[0][128..] != made[1][128..]);
        assert!(made[0].iter().all(|id| *id < 50));
        // Another trace has other numbers.
        assert_ne!(Blinds::default().prompt(&first, &[], false).blocks, prompts[0].blocks);
    }

    #[test]
    fn what_is_broken_is_named_by_its_line() {
        let good = text(&[Line::plain(0, Prompt::default(), 1)]);
        for (bad, words) in [
            (String::new(), "line 1: the file is empty"),
            (good.replace("\"plimsoll_trace\":1", "\"plimsoll_trace\":2"), "line 1: the trace has version 2"),
            // Another version can have other fields.
            ("{\"plimsoll_trace\":2,\"pages\":[]}".into(), "line 1: the trace has version 2"),
            ("{\"model\":\"x\"}".into(), "line 1: this is not a trace of plimsoll"),
            ("{\"plimsoll_trace\":1}".into(), "line 1: missing field `block_tokens`"),
            (good.replace("\"at_ms\":0", "\"at_ms\":-1") + "\n", "line 2: "),
            (format!("{good}\nnonsense\n"), "line 3: "),
            (format!("{good}\nnonsense\n{good}"), "line 3: "),
            (good.replace("\"n\":1", "\"n\":4000000") + "\n", "line 2: 4000000 completions"),
            (good.replace("\"tokens\":0", "\"tokens\":4000000000") + "\n", "line 2: a prompt of 4000000000 tokens"),
            (
                good.replace("\"tokens\":0", "\"tokens\":5,\"ids\":[]") + "\n",
                "line 2: a prompt of 5 tokens that has 0 ids",
            ),
            (
                good.replace("\"tokens\":0", "\"tokens\":1,\"ids\":[1,2]") + "\n",
                "line 2: a prompt of 1 tokens that has 2",
            ),
        ] {
            let error = Trace::read(bad.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
        let long = vec![b' '; LINE_BYTES_MAX + 2];
        assert!(Trace::read(&long[..]).unwrap_err().to_string().contains("longer than"));
    }

    #[test]
    fn a_line_whose_end_is_missing_is_left_out_and_said() {
        let line = |at| Line::plain(at, Prompt { tokens: 3, blocks: vec![7], ..Prompt::default() }, 5);
        let whole = text(&[line(1), line(2), line(3)]);
        let last = whole.rfind('\n').unwrap() + 1;
        for cut in last + 1..whole.len() {
            let trace = Trace::read(&whole.as_bytes()[..cut]).unwrap();
            assert_eq!((trace.lines.len(), trace.torn), (2, Some(4)), "cut at {cut}");
        }
        for whole in [whole.clone(), whole.clone() + "\n"] {
            let trace = Trace::read(whole.as_bytes()).unwrap();
            assert_eq!((trace.lines.len(), trace.torn), (3, None));
        }
        // A cut in the middle of a character, too.
        let cut = [whole.as_bytes(), b"\n{\"x\":\"\xc3"].concat();
        assert_eq!(Trace::read(&cut[..]).unwrap().torn, Some(5));
        // A whole line with an error is no torn line.
        let wrong = whole[..last].to_owned() + &whole[last..].replace("\"n\":1", "\"n\":-1");
        for wrong in [wrong, whole + "\nnonsense"] {
            let error = Trace::read(wrong.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("line 4: ") || error.starts_with("line 5: "), "{error}");
        }
    }
}
