//! The two text formats of metrics: finds the requested one, and joins the pages of several registries into one.

use axum::http::{HeaderMap, header};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exposition {
    /// Prometheus' own format, version 0.0.4: the default for clients that ask for no known format.
    Text,
    /// OpenMetrics 1.0.0.
    OpenMetrics,
}

impl Exposition {
    /// Returns the format that the `Accept` header prefers.
    pub fn of(headers: &HeaderMap) -> Self {
        let accept = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let (mut text, mut open) = (0.0, 0.0);
        for range in accept.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let parameters = parts.filter_map(|part| part.split_once('='));
            let (mut quality, mut version) = (1.0f32, "");
            for (name, value) in parameters.map(|(name, value)| (name.trim(), value.trim().trim_matches('"'))) {
                match name {
                    "q" | "Q" => quality = value.parse().unwrap_or(0.0),
                    "version" => version = value,
                    _ => {}
                }
            }
            match kind.as_str() {
                "application/openmetrics-text" if matches!(version, "" | "1.0.0") => open = f32::max(open, quality),
                "text/plain" if matches!(version, "" | "0.0.4") => text = f32::max(text, quality),
                _ => {}
            }
        }
        if open > 0.0 && open >= text { Self::OpenMetrics } else { Self::Text }
    }

    /// Returns the media type of the format.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// A family of metrics on a page.
struct Family<'a> {
    name: &'a str,
    /// Keywords and texts of the family's `# HELP`, `# TYPE` and `# UNIT` lines, in their order.
    words: Vec<(&'a str, &'a str)>,
    samples: Vec<&'a str>,
}

/// Joins OpenMetrics pages into one page of a format: a family is described once, with the samples of all pages.
pub(super) fn joined(texts: &[String], exposition: Exposition) -> String {
    let mut families: Vec<Family<'_>> = Vec::new();
    for text in texts {
        let mut at = 0;
        for line in text.lines().filter(|line| *line != "# EOF") {
            // "# HELP name ...", "# TYPE name ...": samples follow their family's description.
            let Some(words) = line.strip_prefix("# ") else {
                families[at].samples.push(line);
                continue;
            };
            let (keyword, rest) = words.split_once(' ').unwrap_or((words, ""));
            let (name, said) = rest.split_once(' ').unwrap_or((rest, ""));
            let known = families.iter().position(|family| family.name == name);
            at = known.unwrap_or_else(|| {
                families.push(Family { name, words: Vec::new(), samples: Vec::new() });
                families.len() - 1
            });
            if families[at].words.iter().all(|(known, _)| *known != keyword) {
                families[at].words.push((keyword, said));
            }
        }
    }
    let mut page = String::new();
    for family in &families {
        write_family(&mut page, family, exposition);
    }
    if exposition == Exposition::OpenMetrics {
        page.push_str("# EOF\n");
    }
    page
}

/// Writes a family. OpenMetrics names a counter's family without `_total`, the older format with it; the older one has no units.
fn write_family(page: &mut String, family: &Family<'_>, exposition: Exposition) {
    let old = exposition == Exposition::Text;
    let is_counter = family.words.contains(&("TYPE", "counter"));
    let suffix = if old && is_counter { "_total" } else { "" };
    for (keyword, said) in &family.words {
        let said = match *said {
            "unknown" if old && *keyword == "TYPE" => "untyped",
            said => said,
        };
        if !(old && *keyword == "UNIT") {
            page.extend(["# ", keyword, " ", family.name, suffix, " ", said, "\n"]);
        }
    }
    page.extend(family.samples.iter().flat_map(|sample| [sample, "\n"]));
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn the_format_is_the_one_that_accept_prefers() {
        use Exposition::{OpenMetrics, Text};
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.1";
        for (accept, format) in [
            ("", Text),
            ("*/*", Text),
            ("text/html,application/xhtml+xml,*/*;q=0.8", Text),
            ("text/plain;version=0.0.4", Text),
            ("application/json", Text),
            ("application/openmetrics-text;version=1.0.0", OpenMetrics),
            ("application/openmetrics-text; version=\"1.0.0\"; charset=utf-8", OpenMetrics),
            ("application/openmetrics-text", OpenMetrics),
            ("application/openmetrics-text;version=0.0.1", Text),
            ("application/openmetrics-text;q=0", Text),
            ("application/openmetrics-text;q=0.2, text/plain;q=0.7", Text),
            (prometheus, OpenMetrics),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, HeaderValue::from_str(accept).unwrap())]);
            assert_eq!(Exposition::of(&headers), format, "{accept}");
        }
        assert_eq!(Exposition::of(&HeaderMap::new()), Text);
    }

    #[test]
    fn a_family_is_described_once() {
        let of = |model: &str| {
            format!(
                "# HELP a The first.\n# TYPE a counter\na_total{{model=\"{model}\"}} 1\n# HELP b_{model} Its own.\n# TYPE b_{model} unknown\nb_{model} 2\n# EOF\n"
            )
        };
        let page = |exposition| joined(&[of("x"), of("y")], exposition);
        let expected = "# HELP a The first.\n# TYPE a counter\na_total{model=\"x\"} 1\na_total{model=\"y\"} 1\n\
                        # HELP b_x Its own.\n# TYPE b_x unknown\nb_x 2\n# HELP b_y Its own.\n# TYPE b_y unknown\nb_y 2\n# EOF\n";
        assert_eq!(page(Exposition::OpenMetrics), expected);
        let older = expected.replace(" a ", " a_total ").replace("unknown", "untyped").replace("# EOF\n", "");
        assert_eq!(page(Exposition::Text), older);
    }
}
