//! Targets for models' output, its stop strings, and the grammars that clients send for it.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use plimsoll_engine::constraint::Grammar;
use plimsoll_grammar::{CompileLimits, Grammars, Guide, Settings, Source};
use plimsoll_memory::heap;
use plimsoll_reply::{Event, ReasoningFormat, ReplyParser, Spec, Start, ToolFormat, Tools};
use plimsoll_text::{StopMatcher, Tokenizer};
use serde_json::json;

use crate::{KIB, MIB, within};

/// The budget of grammars in bytes.
const GRAMMAR_BYTES: usize = 16 * MIB;

/// The number of tokens of a walk through a grammar.
const STEPS: usize = 24;

/// Compiles a grammar and walks through it: the first byte selects its kind, the second the walk.
pub(crate) fn grammar(data: &[u8]) {
    static GRAMMARS: OnceLock<(Arc<Grammars>, u64)> = OnceLock::new();
    let [kind, way, text @ ..] = data else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let source = match kind % 5 {
        0 => match serde_json::from_str(text) {
            Ok(serde_json::Value::Null) | Err(_) => return,
            Ok(schema) => Source::JsonSchema(schema.to_string()),
        },
        1 => Source::Regex(text.into()),
        2 => Source::Lark(text.into()),
        3 => Source::Choice(text.lines().map(str::to_owned).collect()),
        _ => Source::JsonObject,
    };
    let (grammars, before) = GRAMMARS.get_or_init(|| {
        let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/models/llama/tokenizer.json");
        let tokenizer = Arc::new(Tokenizer::from_file(&file).expect("the fixture is there"));
        let (vocab, ends) = (tokenizer.vocab_size(), tokenizer.eos().to_vec());
        let settings =
            Settings { tokenizer, vocab, ends, spelled: Vec::new(), bytes: GRAMMAR_BYTES as u64, sandbox: None };
        let before = heap::in_use();
        (Grammars::new(settings), before)
    });
    // The temporary memory of compiling is limited by its steps, not in bytes.
    within(256 * MIB, || {
        let Ok(guide) = Guide::new(grammars, Some(&source), "", None, &CompileLimits::default()) else { return };
        walk(&guide, usize::from(*way));
    });
    let (kept, usage) = (heap::in_use().saturating_sub(*before), grammars.usage());
    assert!(usage.used <= usage.limit, "{usage:?}");
    assert!(kept <= 2 * GRAMMAR_BYTES as u64, "{kept} bytes are kept where {usage:?} are counted");
}

fn walk(guide: &Guide, way: usize) {
    let Ok(mut constraint) = guide.begin() else { return };
    for step in 0..STEPS {
        let Ok(Some(mask)) = constraint.allowed() else { return };
        let bits = mask.iter().enumerate().flat_map(|(word, bits)| {
            (0..32).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| word as u32 * 32 + bit)
        });
        let allowed: Vec<u32> = bits.collect();
        assert!(!allowed.is_empty(), "something may come, or it is over");
        // The constraint may still exceed its budget.
        if constraint.accept(allowed[(way * (step + 1)) % allowed.len()]).is_err() || constraint.complete() {
            return;
        }
    }
}

/// Reads a reply: two bytes select the reader's settings, a third how the text is cut.
pub(crate) fn reply(data: &[u8]) {
    use ReasoningFormat as R;
    use ToolFormat as T;
    const TOOLS: [T; 16] = [
        T::Hermes,
        T::QwenXml,
        T::Llama3,
        T::Mistral,
        T::DeepSeek,
        T::Glm,
        T::FunctionGemma,
        T::Gemma4,
        T::Harmony,
        T::Lfm2,
        T::Olmo3,
        T::KimiK2,
        T::Nemotron,
        T::Granite,
        T::Phi4Mini,
        T::Hunyuan,
    ];
    const THOUGHTS: [R; 5] = [R::Think, R::Mistral, R::Seed, R::Gemma4, R::Harmony];
    let [tools, reasoning, step, text @ ..] = data else { return };
    let text = String::from_utf8_lossy(text);
    let known = Arc::new(Tools::from_openai(&json!([{"type": "function", "function": {"name": "f", "parameters":
        {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}])));
    let spec = Spec {
        reasoning: THOUGHTS.get(usize::from(reasoning % 8)).copied(),
        start: [Start::Turn, Start::Reasoning, Start::Answer, Start::Reasoning][usize::from(reasoning >> 3 & 3)],
        tools: TOOLS.get(usize::from(tools % 20)).map(|format| (*format, known)),
        ..Spec::default()
    };
    let whole = read(&spec, &[&text]);
    let chars: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = chars.chunks(1 + usize::from(step % 4)).map(|some| some.iter().collect()).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    assert_eq!(read(&spec, &pieces), whole, "cut in pieces it reads differently");
}

/// Reasoning, content, and calls as (name, id, arguments).
type Parts = (String, String, Vec<(String, Option<String>, String)>);

fn read(spec: &Spec, pieces: &[&str]) -> Parts {
    let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
    let mut events = Vec::new();
    // An event for every few bytes, each with its own text.
    within(256 * bytes + 64 * KIB, || {
        let mut parser = ReplyParser::new(spec);
        pieces.iter().for_each(|piece| parser.push(piece, &mut events));
        parser.finish(&mut events);
        assert!(parser.reasoning_end() <= bytes);
    });
    let (mut parts, mut open) = (Parts::default(), false);
    for event in events {
        match event {
            Event::Reasoning(text) => parts.0.push_str(&text),
            Event::Content(text) => parts.1.push_str(&text),
            Event::CallBegin { name, id } => {
                assert!(!std::mem::replace(&mut open, true), "calls never interleave");
                parts.2.push((name, id, String::new()));
            }
            Event::Arguments(text) => {
                assert!(open, "arguments belong to a call");
                parts.2.last_mut().expect("it is open").2.push_str(&text);
            }
            Event::CallEnd => assert!(std::mem::replace(&mut open, false), "a call ends once"),
        }
    }
    assert!(!open, "every call ends");
    parts
}

/// Searches a text for strings that end it; the first byte selects how the text is cut.
pub(crate) fn stops(data: &[u8]) {
    let Some((step, data)) = data.split_first() else { return };
    let data = String::from_utf8_lossy(data);
    let mut parts = data.split('\0');
    let text = parts.next().unwrap_or_default();
    let stops: Vec<&str> = parts.collect();
    let Ok(mut matcher) = StopMatcher::new(&stops) else { return };
    let ends = (1..=text.len()).find_map(|end| {
        let here = |stop: &&&str| text.as_bytes()[..end].ends_with(stop.as_bytes());
        stops.iter().filter(here).map(|stop| stop.len()).max().map(|length| end - length)
    });
    let chars: Vec<char> = text.chars().collect();
    let (mut out, mut over) = (String::new(), false);
    for some in chars.chunks(1 + usize::from(step % 5)) {
        let piece: String = some.iter().collect();
        let (before, most) = (out.len(), matcher.appended_max(piece.len()));
        over = matcher.push(&piece, &mut out);
        assert!(out.len() - before <= most);
        if over {
            break;
        }
    }
    matcher.finish(&mut out);
    assert_eq!((out.as_str(), over), (&text[..ends.unwrap_or(text.len())], ends.is_some()));
}
