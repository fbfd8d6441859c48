//! Placeholders in prompts. A template's placeholder becomes as many tokens as its medium has. Text from the client
//! never becomes a placeholder.

use plimsoll_engine::{EncoderKind, MediaSpec, Spelling};
use plimsoll_media::Modality;
use plimsoll_text::Tokenizer;
use serde_json::{Map, Value};

use super::measure::Measured;
use crate::http::error::{ApiError, ApiResult, CONTEXT_LENGTH};

/// Marks the place where a client's spelling of a placeholder is split: a character that no text uses (a noncharacter of Unicode).
const CUTS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// The placeholders of a model, as tokens and as text.
pub(crate) struct Placeholders<'a> {
    spec: &'a MediaSpec,
    tokenizer: &'a Tokenizer,
}

/// A client's strings after the removal of all placeholders.
pub(crate) struct Guarded {
    /// The character that splits the placeholders in them; none if there was no placeholder.
    cut: Option<char>,
}

impl<'a> Placeholders<'a> {
    pub fn new(spec: &'a MediaSpec, tokenizer: &'a Tokenizer) -> Self {
        Self { spec, tokenizer }
    }

    fn id(&self, kind: Modality) -> Option<u32> {
        match kind {
            Modality::Image => self.spec.image.as_ref().map(|image| image.placeholder),
            Modality::Video => self.spec.video.as_ref().map(|video| video.placeholder),
            Modality::Audio => self.spec.audio.as_ref().map(|audio| audio.placeholder),
        }
    }

    /// Returns the text of the token at each position of a medium.
    fn pad(&self, kind: Modality) -> &str {
        self.id(kind).map_or("", |id| self.tokenizer.token_name(id))
    }

    /// Returns the text that a template writes for a medium of this kind; empty if the model takes none.
    fn word(&self, kind: Modality) -> &str {
        match (&self.spec.spelling, kind) {
            _ if self.id(kind).is_none() => "",
            (Spelling::Framed { video, .. } | Spelling::Clocked { video, .. }, Modality::Video) => video,
            (Spelling::Paragraph { start, .. }, Modality::Image) => start,
            (Spelling::Tiled { image, .. }, Modality::Image) => image,
            _ => self.pad(kind),
        }
    }

    /// Returns the texts that a template may write for a medium, and a client must not.
    fn texts(&self) -> Vec<&str> {
        let of_kind = |kind| [self.pad(kind), self.word(kind)];
        Modality::ALL.into_iter().flat_map(of_kind).filter(|text| !text.is_empty()).collect()
    }

    /// Returns whether a prompt has a placeholder.
    pub fn any_in(&self, prompt: &str) -> bool {
        self.texts().iter().any(|text| prompt.contains(text))
    }

    /// Returns the messages as text alone, with a placeholder at the place of each medium, for a template that ignores media. None for a
    /// model whose template writes more than a placeholder for a medium.
    pub fn as_text(&self, messages: &Value) -> Option<Value> {
        let line_end = match &self.spec.spelling {
            Spelling::Plain | Spelling::Interleaved { .. } | Spelling::Timed => return None,
            // The models of this spelling were trained with it.
            Spelling::Framed { .. } => "\n",
            _ => "",
        };
        let text = |part: &Value| match Modality::ALL.into_iter().find(|kind| part["type"] == kind.name()) {
            Some(kind) => format!("{}{line_end}", self.word(kind)),
            None => part["text"].as_str().unwrap_or_default().to_owned(),
        };
        let mut messages = messages.clone();
        let contents = messages.as_array_mut().into_iter().flatten().filter_map(|message| message.get_mut("content"));
        for content in contents {
            if let Value::Array(parts) = content {
                *content = parts.iter().map(text).collect::<String>().into();
            }
        }
        Some(messages)
    }

    /// Splits the placeholders in the client's strings: they are then tokenized like any other text.
    pub fn guard(&self, param: &str, values: Vec<&mut Value>, more: &mut Map<String, Value>) -> ApiResult<Guarded> {
        let texts = self.texts();
        let mut found = Found { texts: &texts, placeholder: false, cuts: 0 };
        values.iter().for_each(|value| found.look(value));
        more.iter().for_each(|(key, value)| found.look_at(key, value));
        if !found.placeholder {
            return Ok(Guarded { cut: None });
        }
        let free = CUTS.zip(0..).find(|(_, bit)| found.cuts & (1u32 << bit) == 0);
        let Some((cut, _)) = free else {
            let message = "the messages have every character that no text has, and a placeholder of the model besides";
            return Err(ApiError::invalid(param, message));
        };
        values.into_iter().chain(more.values_mut()).for_each(|value| part(value, &texts, cut));
        Ok(Guarded { cut: Some(cut) })
    }

    /// Replaces the template's placeholders with the spelling of the model's processor. A later count detects a template that writes them
    /// otherwise.
    pub fn spell(&self, prompt: String, media: &[Measured]) -> String {
        let (pad, word) = (|kind| self.pad(kind), |kind| self.word(kind));
        match &self.spec.spelling {
            Spelling::Plain => prompt,
            Spelling::Interleaved { start, end } => replaced(&prompt, media, pad, |medium| {
                let pad = pad(medium.shape.modality);
                if medium.stretches.is_empty() { pad.to_owned() } else { format!("{start}{pad}{end}") }
            }),
            Spelling::Timed => timed(prompt, media, pad(Modality::Video)),
            Spelling::Paragraph { start, end } => {
                let pad = pad(Modality::Image);
                each(&prompt, media, word(Modality::Image), |_, spelled| {
                    spelled.push_str(&format!("\n\n{start}{pad}{end}\n\n"))
                })
            }
            Spelling::Pieces { start, end, whole } => {
                in_pieces(&prompt, media, pad(Modality::Image), [start, end, whole])
            }
            Spelling::Rows { next, end } => each(&prompt, media, pad(Modality::Image), |medium, spelled| {
                let pad = pad(Modality::Image);
                for row in 1..=medium.runs {
                    spelled.push_str(pad);
                    spelled.push_str(if row < medium.runs { next } else { end });
                }
            }),
            Spelling::Squares { around, whole } => in_squares(&prompt, media, pad(Modality::Image), [around, whole]),
            Spelling::Tiled { image, start, end, column, row } => {
                let pad = pad(Modality::Image);
                each(&prompt, media, image, |medium, spelled| {
                    spelled.push_str(start);
                    if let Some(cut) = &medium.cut {
                        let tiles = vec![pad; cut.columns as usize].join(column) + row;
                        spelled.push_str(&tiles.repeat(cut.rows as usize));
                    }
                    spelled.push_str(&format!("{image}{pad}{end}"));
                })
            }
            Spelling::Framed { start, end, .. } => {
                let pad = pad(Modality::Image);
                let whole = format!("{start}{pad}{end}");
                let frame = |n: u64| format!("Frame{n}: {whole}");
                let spell = |medium: &Measured| match medium.shape.modality {
                    Modality::Video => (1..=medium.runs).map(frame).collect::<Vec<_>>().join("\n"),
                    _ => whole.clone(),
                };
                replaced(&prompt, media, word, spell)
            }
            Spelling::Clocked { start, end, audio: [before, after], .. } => {
                let (image, frame, clip) = (pad(Modality::Image), pad(Modality::Video), pad(Modality::Audio));
                let clock = |seconds: &f64| {
                    let seconds = *seconds as u64;
                    format!("{:02}:{:02} {start}{frame}{end}", seconds / 60, seconds % 60)
                };
                replaced(&prompt, media, word, |medium| match medium.shape.modality {
                    Modality::Image => format!("{start}{image}{end}"),
                    Modality::Video => medium.times.iter().map(clock).collect::<Vec<_>>().join(" "),
                    Modality::Audio => format!("{before}{clip}{after}"),
                })
            }
        }
    }

    /// Repeats every placeholder as often as its medium has tokens, and notes the position of each medium.
    pub fn expand(&self, param: &str, ids: Vec<u32>, media: &mut [Measured], context: u32) -> ApiResult<Vec<u32>> {
        let more: u64 = media.iter().map(|medium| medium.shape.tokens.saturating_sub(medium.runs)).sum();
        let total = ids.len() as u64 + more;
        if total > u64::from(context) {
            let message = format!(
                "this model's maximum context length is {context} tokens; the request has {total} in the prompt"
            );
            return Err(ApiError { code: Some(CONTEXT_LENGTH), ..ApiError::invalid(param, message) });
        }
        let mut all = Vec::with_capacity(total as usize);
        let mut waiting = media.iter_mut();
        // The current medium, and the number of its next placeholder.
        let mut open: Option<(&mut Measured, u64)> = None;
        for id in ids {
            if !self.spec.is_placeholder(id) {
                all.push(id);
                continue;
            }
            let (medium, nth) = match open.take() {
                Some(open) => open,
                None => (waiting.next().ok_or_else(|| self.unmatched(param))?, 0),
            };
            if self.id(medium.shape.modality) != Some(id) {
                return Err(self.unmatched(param));
            }
            if !medium.stretches.is_empty() {
                let track = waiting.next().ok_or_else(|| self.unmatched(param))?;
                self.take_turns(medium, track, &mut all);
                continue;
            }
            let each = medium.begin_run(nth, all.len() as u32);
            all.extend(std::iter::repeat_n(id, each));
            open = (nth + 1 < medium.runs).then_some((medium, nth + 1));
        }
        if open.is_some() || waiting.next().is_some() {
            return Err(self.unmatched(param));
        }
        Ok(all)
    }

    /// Writes the interleaved placeholders of a video and of its audio track, and notes the position of each.
    fn take_turns(&self, video: &mut Measured, track: &mut Measured, all: &mut Vec<u32>) {
        let mut firsts = [&mut track.first, &mut video.first].map(Some);
        for (encoder, tokens) in &video.stretches {
            let (first, kind) = match encoder {
                EncoderKind::Audio => (0, Modality::Audio),
                EncoderKind::Vision => (1, Modality::Video),
            };
            if let Some(first) = firsts[first].take() {
                *first = all.len() as u32;
            }
            all.extend(std::iter::repeat_n(self.id(kind).unwrap_or_default(), *tokens));
        }
    }

    fn unmatched(&self, param: &str) -> ApiError {
        let message = "the served model's chat template does not write one placeholder for each image, video and audio input, in their order";
        ApiError::invalid(param, format!("{param}: {message}"))
    }
}

/// Writes before every group of a video's frames the time at which it is shown.
fn timed(prompt: String, media: &[Measured], pad: &str) -> String {
    if pad.is_empty() || media.iter().all(|medium| medium.times.is_empty()) {
        return prompt;
    }
    let whole = format!("<|vision_start|>{pad}<|vision_end|>");
    let mut stamped = String::with_capacity(prompt.len());
    let mut rest = prompt.as_str();
    for medium in media.iter().filter(|medium| medium.shape.modality == Modality::Video) {
        let (at, length) = match (rest.find(&whole), rest.find(pad)) {
            (Some(at), _) => (at, whole.len()),
            (None, Some(at)) => (at, pad.len()),
            (None, None) => break,
        };
        stamped.push_str(&rest[..at]);
        rest = &rest[at + length..];
        for time in &medium.times {
            stamped.push_str(&format!("<{time:.1} seconds>{whole}"));
        }
    }
    stamped.push_str(rest);
    stamped
}

/// Returns the prompt with each medium's word replaced by the result of `spell`.
fn replaced<'w>(
    prompt: &str,
    media: &[Measured],
    word: impl Fn(Modality) -> &'w str,
    spell: impl Fn(&Measured) -> String,
) -> String {
    let mut spelled = String::with_capacity(prompt.len());
    let mut rest = prompt;
    // The spelling of a video includes its audio track.
    for medium in media.iter().filter(|medium| !medium.of_video) {
        let word = word(medium.shape.modality);
        let Some(at) = rest.find(word).filter(|_| !word.is_empty()) else { break };
        spelled.push_str(&rest[..at]);
        rest = &rest[at + word.len()..];
        spelled.push_str(&spell(medium));
    }
    spelled.push_str(rest);
    spelled
}

/// Writes images between two words, with a tag before each piece.
fn in_pieces(prompt: &str, media: &[Measured], pad: &str, [start, end, whole]: [&str; 3]) -> String {
    each(prompt, media, pad, |medium, spelled| {
        spelled.push_str(start);
        match &medium.cut {
            Some(cut) => {
                for (row, column) in (1..=cut.rows).flat_map(|row| (1..=cut.columns).map(move |column| (row, column))) {
                    spelled.push_str(&format!("<|img_row_{row}_col_{column}|>{pad}"));
                }
                if cut.whole.is_some() {
                    spelled.push_str(whole);
                    spelled.push_str(pad);
                }
            }
            None => spelled.push_str(pad),
        }
        spelled.push_str(end);
    })
}

/// Writes the tiles of images in rows of lines, with a word before each tile, and the whole image after an empty line.
fn in_squares(prompt: &str, media: &[Measured], pad: &str, [around, whole]: [&str; 2]) -> String {
    each(prompt, media, pad, |medium, spelled| {
        if let Some(cut) = &medium.cut {
            for row in 1..=cut.rows {
                for column in 1..=cut.columns {
                    spelled.push_str(&format!("{around}<row_{row}_col_{column}>{pad}"));
                }
                spelled.push('\n');
            }
            spelled.push('\n');
        }
        spelled.push_str(&format!("{around}{whole}{pad}{around}"));
    })
}

/// Returns the prompt with each image's placeholder replaced by the text that `spell` writes.
fn each(prompt: &str, media: &[Measured], pad: &str, spell: impl Fn(&Measured, &mut String)) -> String {
    replaced(
        prompt,
        media,
        |_| pad,
        |medium| {
            let mut spelled = String::new();
            spell(medium, &mut spelled);
            spelled
        },
    )
}

impl Guarded {
    /// Splits a prompt into pieces so that no token spans two of them.
    pub fn pieces<'t>(&self, prompt: &'t str) -> Vec<&'t str> {
        match self.cut {
            Some(cut) => prompt.split(cut).collect(),
            None => vec![prompt],
        }
    }

    /// Returns the prompt without the marks.
    pub fn plain(&self, prompt: String) -> String {
        match self.cut {
            Some(cut) => prompt.replace(cut, ""),
            None => prompt,
        }
    }
}

/// The findings in a client's strings.
struct Found<'a> {
    texts: &'a [&'a str],
    placeholder: bool,
    /// A bit for each of [`CUTS`] that occurs.
    cuts: u32,
}

impl Found<'_> {
    fn look(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.look_in(text),
            Value::Array(list) => list.iter().for_each(|value| self.look(value)),
            Value::Object(map) => map.iter().for_each(|(key, value)| self.look_at(key, value)),
            _ => {}
        }
    }

    fn look_at(&mut self, key: &str, value: &Value) {
        self.look_in(key);
        self.look(value);
    }

    fn look_in(&mut self, text: &str) {
        self.placeholder |= self.texts.iter().any(|placeholder| text.contains(placeholder));
        // The UTF-8 of each begins with these two bytes.
        if text.as_bytes().windows(2).any(|two| two == [0xEF, 0xB7]) {
            for c in text.chars().filter(|c| CUTS.contains(c)) {
                self.cuts |= 1 << (c as u32 - *CUTS.start() as u32);
            }
        }
    }
}

/// Splits every placeholder after its first character.
fn part(value: &mut Value, texts: &[&str], cut: char) {
    let parted = |text: &str| {
        texts.iter().fold(text.to_owned(), |text, placeholder| {
            let head = placeholder.chars().next().map_or(0, char::len_utf8);
            text.replace(placeholder, &format!("{}{cut}{}", &placeholder[..head], &placeholder[head..]))
        })
    };
    match value {
        Value::String(text) if texts.iter().any(|placeholder| text.contains(placeholder)) => *text = parted(text),
        Value::Array(list) => list.iter_mut().for_each(|value| part(value, texts, cut)),
        Value::Object(map) => {
            if map.keys().any(|key| texts.iter().any(|placeholder| key.contains(placeholder))) {
                *map = std::mem::take(map).into_iter().map(|(key, value)| (parted(&key), value)).collect();
            }
            map.values_mut().for_each(|value| part(value, texts, cut));
        }
        _ => {}
    }
}

#[cfg(test)]
#[path = "prompt_tests.rs"]
mod tests;
