//! Segments as subtitles: SubRip (`srt`) and WebVTT (`vtt`). Segments without text are left out.

use std::fmt::Write;

/// Formats a time in milliseconds, with `mark` before its thousandths.
fn clock(millis: u64, mark: char) -> String {
    let (seconds, millis) = (millis / 1000, millis % 1000);
    format!("{:02}:{:02}:{:02}{mark}{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Returns a text as lines of a cue: a blank line would end the cue, and `-->` would begin another.
fn lines(text: &str) -> String {
    let lines: Vec<&str> = text.trim().lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    lines.join("\n").replace("-->", "->")
}

/// Returns cues for SubRip, from beginnings and ends in milliseconds and texts.
pub(super) fn srt<'t>(cues: impl Iterator<Item = ([u64; 2], &'t str)>) -> String {
    let mut out = String::new();
    let cues = cues.filter(|(_, text)| !text.trim().is_empty());
    for (nth, ([start, end], text)) in (1..).zip(cues) {
        let (start, end) = (clock(start, ','), clock(end, ','));
        let _ = write!(out, "{nth}\n{start} --> {end}\n{}\n\n", lines(text));
    }
    out
}

/// Returns cues for WebVTT, from beginnings and ends in milliseconds and texts.
pub(super) fn vtt<'t>(cues: impl Iterator<Item = ([u64; 2], &'t str)>) -> String {
    let mut out = "WEBVTT\n\n".to_owned();
    for ([start, end], text) in cues.filter(|(_, text)| !text.trim().is_empty()) {
        let (start, end) = (clock(start, '.'), clock(end, '.'));
        // The two characters that begin a tag or an escape in WebVTT.
        let text = lines(text).replace('&', "&amp;").replace('<', "&lt;");
        let _ = write!(out, "{start} --> {end}\n{text}\n\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUES: [([u64; 2], &str); 4] = [
        ([0, 1_340], " Is the mark\n\n dry? "),
        ([1_340, 1_340], "  "),
        ([59_999, 61_005], "a --> b <i> & c"),
        ([3_599_980, 36_000_000], "Ten hours."),
    ];

    #[test]
    fn subtitles_have_hours_and_thousandths_and_no_empty_cue() {
        let expected = "1\n00:00:00,000 --> 00:00:01,340\nIs the mark\n dry?\n\n\
             2\n00:00:59,999 --> 00:01:01,005\na -> b <i> & c\n\n\
             3\n00:59:59,980 --> 10:00:00,000\nTen hours.\n\n";
        assert_eq!(srt(CUES.into_iter()), expected);
        let expected = "WEBVTT\n\n00:00:00.000 --> 00:00:01.340\nIs the mark\n dry?\n\n\
             00:00:59.999 --> 00:01:01.005\na -> b &lt;i> &amp; c\n\n\
             00:59:59.980 --> 10:00:00.000\nTen hours.\n\n";
        assert_eq!(vtt(CUES.into_iter()), expected);
        assert_eq!((srt([].into_iter()), vtt([].into_iter())), (String::new(), "WEBVTT\n\n".to_owned()));
    }
}
