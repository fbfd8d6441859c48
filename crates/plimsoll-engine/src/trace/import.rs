//! Published traces of other projects, in their own formats.

use std::io::BufRead;

use serde::Deserialize;

use super::{Head, Line, Lines, Prompt, Trace, TraceError, check, each_line, unfinished};

/// Tokens of a block in Mooncake's traces.
const MOONCAKE_BLOCK_TOKENS: u32 = 512;

/// One request of a trace as Mooncake (FAST '25) publishes them: JSON lines.
#[derive(Deserialize)]
struct Mooncake {
    /// Milliseconds.
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// Reads Mooncake's JSON lines: `timestamp` in milliseconds, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens.
pub fn mooncake(file: impl BufRead) -> Result<Trace, TraceError> {
    let mut lines = Lines::default();
    let torn = each_line(file, unfinished, |number, text| {
        let one: Mooncake = serde_json::from_str(text)
            .map_err(|error| TraceError::Line { line: number, why: format!("not a request of Mooncake's: {error}") })?;
        check(number, one.input_length, 1)?;
        let blocks = one.input_length.div_ceil(MOONCAKE_BLOCK_TOKENS) as usize;
        if one.hash_ids.len() != blocks {
            let why =
                format!("{} hash_ids for {} tokens, which are {blocks} blocks", one.hash_ids.len(), one.input_length);
            return Err(TraceError::Line { line: number, why });
        }
        let prompt = Prompt { tokens: one.input_length, blocks: one.hash_ids, ..Prompt::default() };
        lines.push(number, Line::plain(one.timestamp, prompt, one.output_length))
    })?;
    Ok(Trace { torn, ..Trace::new(Head { block_tokens: MOONCAKE_BLOCK_TOKENS, ..Head::default() }, lines) })
}

/// Reads BurstGPT's CSV: a line of names, among them `Timestamp` in seconds, `Request tokens` and `Response tokens`. The trace does not
/// record equal prompts, so all prompts differ. Requests without a response failed there and are left out.
pub fn burst_gpt(file: impl BufRead) -> Result<Trace, TraceError> {
    let mut columns: Option<[usize; 3]> = None;
    let mut lines = Lines::default();
    let mut first_ms = None;
    // A row that is cut in its last cell still has numbers in it.
    let torn = each_line(
        file,
        |_| true,
        |number, text| {
            let bad = |why: String| TraceError::Line { line: number, why };
            let cells: Vec<&str> = text.split(',').map(|cell| cell.trim().trim_matches('"')).collect();
            let Some(columns) = columns else {
                let place = |name: &str| {
                    let found = cells.iter().position(|cell| cell.eq_ignore_ascii_case(name));
                    found.ok_or_else(|| bad(format!("no column '{name}' in BurstGPT's CSV")))
                };
                columns = Some([place("Timestamp")?, place("Request tokens")?, place("Response tokens")?]);
                return Ok(());
            };
            let cell = |column: usize| {
                let number = cells.get(columns[column]).and_then(|cell| cell.parse::<f64>().ok());
                let number = number.filter(|number| number.is_finite() && *number >= 0.0);
                number.ok_or_else(|| bad(format!("column {} is not a number", columns[column] + 1)))
            };
            let (at_ms, tokens, output) = ((cell(0)? * 1000.0) as u64, cell(1)? as u32, cell(2)? as u32);
            check(number, tokens, 1)?;
            if output == 0 || tokens == 0 {
                return Ok(());
            }
            let since = at_ms.saturating_sub(*first_ms.get_or_insert(at_ms));
            let blocks =
                (0..u64::from(tokens.div_ceil(super::BLOCK_TOKENS))).map(|block| (number as u64) << 24 | block);
            let prompt = Prompt { tokens, blocks: blocks.collect(), ..Prompt::default() };
            lines.push(number, Line::plain(since, prompt, output))
        },
    )?;
    Ok(Trace { torn, ..Trace::new(Head::default(), lines) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mooncakes_blocks_are_kept() {
        let text = r#"{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}
            {"timestamp": 27480, "input_length": 512, "output_length": 9, "hash_ids": [46]}"#;
        let trace = mooncake(text.as_bytes()).unwrap();
        assert_eq!(trace.head.block_tokens, 512);
        let [first, second] = &trace.lines[..] else { panic!("{trace:?}") };
        assert_eq!((first.at_ms, first.prompts[0].tokens, first.output), (27480, 512, 9));
        assert_eq!(second.prompts[0].blocks, [46, 47]);
        let ids = |line: &Line| trace.ids(&line.prompts[0], 1000);
        assert!(ids(first)[..] == ids(second)[..512]);
        let error = mooncake(text.replace("[46, 47]", "[46]").as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 1: 1 hash_ids for 600 tokens"), "{error}");
    }

    #[test]
    fn burst_gpts_failures_are_left_out() {
        let text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
                    5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118.5,GPT-4,417,276,693,API log\n";
        let trace = burst_gpt(text.as_bytes()).unwrap();
        let seen: Vec<_> = trace.lines.iter().map(|line| (line.at_ms, line.prompts[0].tokens, line.output)).collect();
        assert_eq!(seen, [(0, 472, 18), (113_500, 417, 276)]);
        assert_ne!(trace.lines[0].prompts[0].blocks[0], trace.lines[1].prompts[0].blocks[0]);
        assert_eq!(trace.torn, None);
        // Cut at any place, the last request is left out and reported: "2" of a response of 276 tokens must not count as 2 tokens.
        let last = text.rfind("118.5").unwrap();
        for cut in last + 1..text.len() {
            let trace = burst_gpt(&text.as_bytes()[..cut]).unwrap();
            assert_eq!((trace.lines.len(), trace.torn), (1, Some(4)), "cut at {cut}");
        }
        let words = |text: &str| burst_gpt(text.as_bytes()).unwrap_err().to_string();
        assert!(words("a,b\n1,2\n").contains("no column 'Timestamp'"));
        assert!(words(&text.replace("472", "4e9")).starts_with("line 2: a prompt of 4000000000 tokens"));
        assert!(words(&text.replace("472", "many")).starts_with("line 2: column 3 is not a number"));
    }
}
