//! The export of traces: `--otlp-endpoint` and the OpenTelemetry environment variables.

use std::fmt;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Uri};

use super::proto::{KeyValue, Value, attribute};
use super::span::cut;

/// The path of traces below an endpoint.
const TRACES_PATH: &str = "/v1/traces";
const TIMEOUT: Duration = Duration::from_secs(10);
/// The most headers, and the most resource attributes, from the environment.
const PAIRS_MAX: usize = 32;
const LONGEST_TIMEOUT_MS: u64 = 60_000;

/// The exporter's configuration.
#[derive(Clone, PartialEq)]
pub struct OtlpConfig {
    /// The URL to which spans are posted.
    pub(crate) url: String,
    /// Headers of each export. They may hold a key: neither `Debug` nor errors print them.
    pub(crate) headers: Vec<(String, String)>,
    /// The time limit of one export.
    pub(crate) timeout: Duration,
    pub(crate) sampler: Sampler,
    service: String,
    attributes: Vec<(String, String)>,
}

/// The rule that decides which requests are traced (`OTEL_TRACES_SAMPLER`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// Share of traces without a parent.
    ratio: f64,
    /// Whether the parent's decision comes first.
    parent: bool,
}

impl Sampler {
    /// Returns whether a trace is sampled. `parent`: the flag of the client's span.
    pub(crate) fn samples(self, trace_id: &[u8; 16], parent: Option<bool>) -> bool {
        match parent.filter(|_| self.parent) {
            Some(sampled) => sampled,
            None => {
                // The low 56 bits are random in W3C's level 2: servers of one trace decide alike.
                let low = u128::from_be_bytes(*trace_id) as u64 & ((1 << 56) - 1);
                self.ratio >= 1.0 || (low as f64) < self.ratio * (1u64 << 56) as f64
            }
        }
    }
}

impl Eq for OtlpConfig {}

impl fmt::Debug for OtlpConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OtlpConfig({}, {} headers)", self.url, self.headers.len())
    }
}

impl OtlpConfig {
    /// Returns the configuration from the flag and the environment; none if neither names an endpoint. `variable` reads the environment.
    ///
    /// # Errors
    /// A message with the flag or the variable, its value and the allowed values.
    pub fn read(flag: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, String> {
        let set = |name: &str| variable(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let of_traces = |name: &str| {
            let own = format!("OTEL_EXPORTER_OTLP_TRACES_{name}");
            let shared = format!("OTEL_EXPORTER_OTLP_{name}");
            set(&own).map(|value| (own, value)).or_else(|| set(&shared).map(|value| (shared, value)))
        };
        let off = set("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || set("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
        let (source, url) = match (flag, of_traces("ENDPOINT").filter(|_| !off)) {
            (Some(flag), _) => ("--otlp-endpoint".to_owned(), below(flag)),
            (None, Some((source, value))) if source.contains("TRACES") => (source, value),
            (None, Some((source, value))) => (source, below(&value)),
            (None, None) => return Ok(None),
        };
        check_url(&source, &url)?;
        if let Some((name, protocol)) = of_traces("PROTOCOL").filter(|(_, protocol)| protocol != "http/protobuf") {
            return Err(format!(
                "{name} is {protocol}; only http/protobuf is supported: set it, with the collector's port 4318"
            ));
        }
        let timeout = match of_traces("TIMEOUT") {
            None => TIMEOUT,
            Some((name, value)) => {
                let ms = value.parse().ok().filter(|ms| (1..=LONGEST_TIMEOUT_MS).contains(ms));
                let wrong = || format!("{name} is {value}; write 1 to {LONGEST_TIMEOUT_MS} milliseconds");
                Duration::from_millis(ms.ok_or_else(wrong)?)
            }
        };
        let headers = of_traces("HEADERS").map_or(Ok(Vec::new()), |(name, value)| headers(&name, &value))?;
        let resource = "OTEL_RESOURCE_ATTRIBUTES";
        let mut attributes = set(resource).map_or(Ok(Vec::new()), |value| pairs(resource, &value))?;
        let listed = attributes.iter().position(|(key, _)| key == "service.name").map(|at| attributes.remove(at).1);
        let service = set("OTEL_SERVICE_NAME").or(listed).unwrap_or_else(|| "plimsoll".into());
        let sampler = sampler(set("OTEL_TRACES_SAMPLER"), set("OTEL_TRACES_SAMPLER_ARG"))?;
        Ok(Some(Self { url, headers, timeout, sampler, service, attributes }))
    }

    /// Returns the attributes of the spans' resource.
    pub(crate) fn resource_attributes(&self) -> Vec<KeyValue> {
        let own = [("service.name", self.service.as_str()), ("service.version", env!("CARGO_PKG_VERSION"))];
        let given = self.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        own.into_iter().chain(given).map(|(key, value)| attribute(cut(key), Value::Text(cut(value).into()))).collect()
    }
}

/// Returns the address of traces below an endpoint.
fn below(endpoint: &str) -> String {
    let base = endpoint.trim_end_matches('/');
    if base.ends_with(TRACES_PATH) { base.into() } else { format!("{base}{TRACES_PATH}") }
}

fn check_url(source: &str, url: &str) -> Result<(), String> {
    let parsed = url.parse::<Uri>().ok();
    let good = parsed.is_some_and(|uri| {
        let named = uri.authority().is_some_and(|authority| !authority.as_str().contains('@'));
        matches!(uri.scheme_str(), Some("http" | "https")) && named
    });
    // The value may hold a password, so the message does not repeat it.
    let wrong = || format!("{source} is not a URL such as http://localhost:4318 (http or https, no user name)");
    good.then_some(()).ok_or_else(wrong)
}

/// Parses `key=value,key=value` with percent escapes in the values.
fn pairs(name: &str, list: &str) -> Result<Vec<(String, String)>, String> {
    let each = |(number, pair): (usize, &str)| {
        let (key, value) = pair.split_once('=').map(|(key, value)| (key.trim(), value.trim())).unwrap_or_default();
        let value = unescaped(value).filter(|_| !key.is_empty());
        let value = value.ok_or_else(|| format!("entry {} of {name} is not key=value", number + 1))?;
        Ok((key.to_owned(), value))
    };
    let listed: Vec<&str> = list.split(',').filter(|pair| !pair.trim().is_empty()).collect();
    if listed.len() > PAIRS_MAX {
        return Err(format!("{name} has {} entries; at most {PAIRS_MAX} are allowed", listed.len()));
    }
    listed.into_iter().enumerate().map(each).collect()
}

fn headers(name: &str, list: &str) -> Result<Vec<(String, String)>, String> {
    let headers = pairs(name, list)?;
    let bad =
        |(key, value): &(String, String)| key.parse::<HeaderName>().is_err() || HeaderValue::from_str(value).is_err();
    match headers.iter().position(bad) {
        Some(at) => Err(format!("entry {} of {name} is not an HTTP header", at + 1)),
        None => Ok(headers),
    }
}

/// Decodes percent escapes; none if one is invalid.
fn unescaped(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let hex = after.get(..2).filter(|hex| hex.iter().all(u8::is_ascii_hexdigit))?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

fn sampler(name: Option<String>, arg: Option<String>) -> Result<Sampler, String> {
    let name = name.unwrap_or_else(|| "parentbased_always_on".into());
    let (parent, kind) = name.strip_prefix("parentbased_").map_or((false, name.as_str()), |kind| (true, kind));
    let ratio = match kind {
        "always_on" => 1.0,
        "always_off" => 0.0,
        "traceidratio" => {
            let arg = arg.unwrap_or_else(|| "1".into());
            let ratio = arg.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
            ratio.ok_or_else(|| format!("OTEL_TRACES_SAMPLER_ARG is {arg}; write a number from 0 to 1"))?
        }
        _ => {
            return Err(format!(
                "OTEL_TRACES_SAMPLER is {name}; write always_on, always_off or traceidratio, each with or without parentbased_"
            ));
        }
    };
    Ok(Sampler { ratio, parent })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<OtlpConfig>, String> {
        OtlpConfig::read(flag, |name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn url(flag: Option<&str>, variables: &[(&str, &str)]) -> Option<String> {
        read(flag, variables).unwrap().map(|config| config.url)
    }

    const SHARED: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318");

    #[test]
    fn the_flag_wins_over_the_variables_and_without_either_nothing_is_traced() {
        assert_eq!(url(None, &[]), None);
        assert_eq!(url(None, &[SHARED]).unwrap(), "http://c:4318/v1/traces");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c/otlp/x");
        assert_eq!(url(None, &[SHARED, own]).unwrap(), "https://c/otlp/x");
        for flag in ["http://d:1", "http://d:1/", "http://d:1/v1/traces"] {
            assert_eq!(url(Some(flag), &[SHARED, own]).unwrap(), "http://d:1/v1/traces");
        }
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(url(None, &[SHARED, off]), None);
            assert!(url(Some("http://d:1"), &[off]).is_some(), "the flag is the operator's last word");
        }
    }

    #[test]
    fn wrong_values_are_named_and_secrets_are_not_printed() {
        for (variable, value) in [
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "60001"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "no-value"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "a=%zz"),
            ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ] {
            let error = read(None, &[SHARED, (variable, value)]).unwrap_err();
            assert!(error.contains(variable), "{error}");
        }
        let many = "a=1,".repeat(PAIRS_MAX + 1);
        assert!(read(None, &[SHARED, ("OTEL_RESOURCE_ATTRIBUTES", &many)]).unwrap_err().contains("33"));
        let ratio = [SHARED, ("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "2")];
        assert!(read(None, &ratio).unwrap_err().contains("OTEL_TRACES_SAMPLER_ARG is 2"));
        for bad in ["c:4318", "ftp://c", "http://", "http://user:secret@c"] {
            let error = read(Some(bad), &[]).unwrap_err();
            assert!(error.contains("--otlp-endpoint") && !error.contains("secret"), "{error}");
        }
        let config = read(None, &[SHARED, ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")]);
        let config = config.unwrap().unwrap();
        assert_eq!(config.headers, [("authorization".to_owned(), "Bearer s3cret".to_owned())]);
        assert!(!format!("{config:?}").contains("s3cret"));
    }

    #[test]
    fn the_resource_has_a_name_and_what_the_operator_adds() {
        let named = |variables: &[(&str, &str)]| {
            let config = read(Some("http://c"), variables).unwrap().unwrap();
            (config.service.clone(), config.resource_attributes().len())
        };
        assert_eq!(named(&[]), ("plimsoll".into(), 2));
        let given = ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,deployment.environment.name=test");
        assert_eq!(named(&[given]), ("a".into(), 3));
        assert_eq!(named(&[given, ("OTEL_SERVICE_NAME", "b")]), ("b".into(), 3));
    }

    #[test]
    fn the_sampler_follows_the_parent_or_the_trace_id() {
        let [low, high] = [[0; 16], [0xff; 16]];
        let of = |name: &str, arg: &str| sampler(Some(name.into()), Some(arg.into())).unwrap();
        let default = sampler(None, None).unwrap();
        assert!(default.samples(&high, None) && !default.samples(&low, Some(false)));
        let half = of("traceidratio", "0.5");
        assert!(half.samples(&low, Some(false)) && !half.samples(&high, Some(true)));
        let parent = of("parentbased_always_off", "");
        assert!(parent.samples(&low, Some(true)) && !parent.samples(&low, None));
    }
}
