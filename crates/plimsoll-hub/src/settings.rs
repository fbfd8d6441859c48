//! Settings of a pull from the environment. They are read here and checked where they are used.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Settings of network access. Build them with [`Settings::from_env`] and change single fields where needed.
#[derive(Clone)]
pub struct Settings {
    /// The hub's address without a path, from `HF_ENDPOINT`; `https://huggingface.co` if unset.
    pub endpoint: String,
    /// The hub token from `HF_TOKEN`. It is sent to the endpoint only, over TLS or to this machine, and never shown.
    pub token: Option<String>,
    /// A file of PEM certificates that replaces the built-in roots, from `SSL_CERT_FILE`: for proxies that
    /// terminate TLS.
    pub root_certificates: Option<PathBuf>,
    /// Commands that may be pip, each a program with leading arguments; the first that works is used.
    pub pip: Vec<Vec<OsString>>,
    /// Timeout of a connection. Short, so that an unreachable hub costs little before the next source.
    pub connect_timeout: Duration,
    /// The longest silence of a server before a transfer counts as broken.
    pub read_timeout: Duration,
    /// The pause before the first retry; doubled for each further one.
    pub retry_pause: Duration,
    /// The longest time that pip may run without visible progress before it is stopped.
    pub pip_stall_timeout: Duration,
}

impl Settings {
    /// Reads `HF_ENDPOINT`, `HF_TOKEN` and `SSL_CERT_FILE`. Proxies (`HTTPS_PROXY`, `NO_PROXY`, ...) and pip's own
    /// configuration are honoured where connections are made.
    #[must_use]
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var_os(name))
    }

    /// Reads the settings from `variable`, which returns a variable's value; an empty one counts as none.
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name| {
            let value = variable(name)?.into_string().ok()?.trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let command = |words: &[&str]| words.iter().map(OsString::from).collect();
        Self {
            endpoint: text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: text("HF_TOKEN"),
            root_certificates: variable("SSL_CERT_FILE").filter(|path| !path.is_empty()).map(PathBuf::from),
            pip: vec![command(&["pip"]), command(&["python3", "-m", "pip"]), command(&["pip3"])],
            connect_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(30),
            retry_pause: Duration::from_secs(1),
            pip_stall_timeout: Duration::from_secs(600),
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "<hidden>"))
            .field("root_certificates", &self.root_certificates)
            .field("pip", &self.pip)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_never_shown() {
        let settings = Settings { token: Some("hf_secret".to_owned()), ..Settings::from_env() };
        assert!(!format!("{settings:?}").contains("hf_secret"));
    }

    #[test]
    fn an_empty_variable_is_none() {
        let unset = Settings::from_variables(|_| None);
        let empty = Settings::from_variables(|_| Some(OsString::new()));
        assert_eq!((empty.root_certificates, empty.token), (None, None));
        assert_eq!(empty.endpoint, unset.endpoint);
        let set = Settings::from_variables(|name| Some(name.into()));
        assert_eq!(set.root_certificates, Some(PathBuf::from("SSL_CERT_FILE")));
        assert_eq!((set.endpoint.as_str(), set.token.as_deref()), ("HF_ENDPOINT", Some("HF_TOKEN")));
    }
}
