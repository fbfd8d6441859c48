//! Scenarios: a soak in a TOML file. `[crowd]` names what the flags of `soak` name, `[server]` says which server to start and what
//! to put around it, every `[[chaos]]` is one kind of trouble that comes and goes, `[trace]` is a trace that is replayed meanwhile.
//!
//! There is one list of names: `[crowd]` is read into the very type the flags are read into, and a flag wins over the file.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Deserializer, Serialize};

use super::mix::Mix;

/// Size limit of a scenario file in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Most clients at once.
const CLIENTS_MAX: u32 = 4096;

/// Which clients come, for how long, and how patient they are. [`Crowd`] has the defaults.
#[derive(Clone, Debug, Default, clap::Args, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Load {
    /// Clients at once [default: 64].
    #[arg(long)]
    pub clients: Option<u32>,
    /// How long to go on: seconds, or a number with s, m or h [default: 600].
    #[arg(long, value_parser = duration)]
    #[serde(default, deserialize_with = "seconds", skip_serializing_if = "Option::is_none")]
    pub duration: Option<Duration>,
    /// Which clients: all, polite, hostile, marathon (800 tokens each), or client profiles with weights, as stream=4,giant=1 [default: all].
    #[arg(long)]
    pub mix: Option<Mix>,
    /// Milliseconds that a client rests between two visits, on average [default: 0].
    #[arg(long)]
    pub think_ms: Option<u64>,
    /// Tokens of the longest prompts [default: 512].
    #[arg(long)]
    pub prompt_tokens: Option<usize>,
    /// Tokens of the longest answers [default: 64].
    #[arg(long)]
    pub output_tokens: Option<usize>,
    /// The slowest hundredth of health probes may take this many milliseconds [default: 100].
    #[arg(long)]
    pub health_ms: Option<u64>,
    /// Seconds that a client waits for its answer before it calls the server broken; a slow machine needs more [default: 300].
    #[arg(long)]
    pub patience: Option<u64>,
    /// Where the clients' choices start; the same number makes the same choices [default: 1].
    #[arg(long)]
    pub seed: Option<u64>,
}

/// A [`Load`] with all defaults filled in.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the fields are those of Load")]
pub struct Crowd {
    pub clients: u32,
    pub duration: Duration,
    pub mix: Mix,
    pub think_ms: u64,
    pub prompt_tokens: usize,
    pub output_tokens: usize,
    pub health_ms: u64,
    pub patience: u64,
    pub seed: u64,
}

impl Load {
    /// Merges the values: these flags win over `file`, and `file` wins over the defaults.
    pub fn over(&self, file: &Self) -> Result<Crowd> {
        let crowd = Crowd {
            clients: self.clients.or(file.clients).unwrap_or(64),
            duration: self.duration.or(file.duration).unwrap_or(Duration::from_secs(600)),
            mix: self.mix.clone().or_else(|| file.mix.clone()).unwrap_or_else(Mix::all),
            think_ms: self.think_ms.or(file.think_ms).unwrap_or(0),
            prompt_tokens: self.prompt_tokens.or(file.prompt_tokens).unwrap_or(512),
            output_tokens: self.output_tokens.or(file.output_tokens).unwrap_or(64),
            health_ms: self.health_ms.or(file.health_ms).unwrap_or(100),
            patience: self.patience.or(file.patience).unwrap_or(300),
            seed: self.seed.or(file.seed).unwrap_or(1),
        };
        if !(1..=CLIENTS_MAX).contains(&crowd.clients) {
            bail!("{} clients: 1 to {CLIENTS_MAX} are allowed", crowd.clients);
        }
        Ok(crowd)
    }
}

/// A whole scenario.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Scenario {
    /// The clients.
    #[serde(default)]
    pub crowd: Load,
    /// The server to start; none if it already runs.
    pub server: Option<Server>,
    /// Faults to inject around the server.
    #[serde(default)]
    pub chaos: Vec<Trouble>,
    /// A trace that is replayed beside the crowd.
    pub trace: Option<Replay>,
}

/// A server to start for the soak, and to end with it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Server {
    /// The model, as `plimsoll serve` takes it.
    pub model: String,
    /// More flags of `plimsoll serve`.
    #[serde(default)]
    pub flags: Vec<String>,
    /// Limit of a memory cgroup without swap around the server: this many percent above its plan (and a balloon's bytes).
    pub cage_percent: Option<u64>,
    /// Descriptors that the server may have open (RLIMIT_NOFILE).
    pub descriptors: Option<u64>,
    /// Size in MiB of a separate disk for the server's log and its trace of requests (`--record`).
    pub disk_mib: Option<u64>,
    /// Size in MiB of a prefix cache on disk (`--cache-dir`), on the separate disk if there is one.
    pub cache_mib: Option<u64>,
}

/// A trace and its pace.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Replay {
    /// The file, beside the scenario's, in any format that `plimsoll replay` reads.
    pub file: PathBuf,
    /// Factor on the recorded speed.
    #[serde(default = "one")]
    pub speed: f64,
    /// At most this many requests at once.
    #[serde(default = "many")]
    pub max_in_flight: usize,
}

fn one() -> f64 {
    1.0
}

fn many() -> usize {
    256
}

/// A kind of fault around a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A neighbour takes nearly all memory that the server's cgroup has left, and gives it back.
    Balloon,
    /// Processes that do nothing useful, each on a whole core.
    Busy,
    /// The server is stopped: SIGSTOP, later SIGCONT. Its clocks still run, so all its timers find that time has jumped.
    Stop,
    /// Connections that send nothing, more than the server has descriptors or connection slots.
    Flood,
    /// The disk with the log and the trace is full.
    FullDisk,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Balloon => "balloon",
            Self::Busy => "busy neighbours",
            Self::Stop => "stopped",
            Self::Flood => "flood of connections",
            Self::FullDisk => "full disk",
        })
    }
}

/// One kind of fault that repeats.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Trouble {
    /// The kind.
    pub kind: Kind,
    /// Time before its first occurrence.
    #[serde(deserialize_with = "length")]
    pub first: Duration,
    /// Duration of each occurrence.
    #[serde(deserialize_with = "length")]
    pub hold: Duration,
    /// Time from the end of one occurrence to the start of the next.
    #[serde(deserialize_with = "length")]
    pub pause: Duration,
    /// For a balloon: MiB that it leaves in the cgroup, one value per occurrence, repeating.
    #[serde(default)]
    pub leave_mib: Vec<u64>,
    /// For busy neighbours or a flood: the number of processes or connections.
    pub count: Option<usize>,
}

/// At most this many processes or connections at once.
const COUNT_MAX: usize = 8192;

impl Trouble {
    /// The fault that `--balloon` adds.
    pub fn balloon() -> Self {
        Self {
            kind: Kind::Balloon,
            first: Duration::from_secs(5),
            hold: Duration::from_secs(8),
            // The server needs time to recover: the governor lowers its level slowly.
            pause: Duration::from_secs(22),
            leave_mib: vec![48, 24, 12],
            count: None,
        }
    }

    fn check(&self) -> Result<()> {
        let kind = self.kind;
        let has_count = matches!(kind, Kind::Busy | Kind::Flood);
        match self.count {
            Some(1..=COUNT_MAX) if has_count => {}
            None if !has_count => {}
            Some(_) if has_count => bail!("{kind}: `count` is 1 to {COUNT_MAX}"),
            Some(_) => bail!("{kind}: `count` means nothing here"),
            None => bail!("{kind}: `count` is missing"),
        }
        if (kind == Kind::Balloon) == self.leave_mib.is_empty() {
            bail!("{kind}: a balloon, and nothing else, has `leave-mib`");
        }
        Ok(())
    }
}

impl Scenario {
    /// Reads a file. Paths in it are relative to its directory.
    ///
    /// # Errors
    /// When the file cannot be read, or a name in it is unknown.
    pub fn read(path: &Path) -> Result<Self> {
        let name = path.display();
        let size = std::fs::metadata(path).with_context(|| name.to_string())?.len();
        if size > FILE_BYTES_MAX {
            bail!("{name}: {size} bytes, and a scenario has at most {FILE_BYTES_MAX}");
        }
        let text = std::fs::read_to_string(path).with_context(|| name.to_string())?;
        let mut scenario: Self = toml::from_str(&text).with_context(|| name.to_string())?;
        if let Some(trace) = &mut scenario.trace {
            trace.file = path.parent().unwrap_or(Path::new("")).join(&trace.file);
        }
        scenario.check().with_context(|| name.to_string())?;
        Ok(scenario)
    }

    fn check(&self) -> Result<()> {
        self.chaos.iter().try_for_each(Trouble::check)?;
        let disk = self.server.as_ref().is_some_and(|server| server.disk_mib.is_some());
        if !disk && self.has(Kind::FullDisk) {
            bail!("{}: a [server] with `disk-mib` is wanted", Kind::FullDisk);
        }
        Ok(())
    }

    /// Whether the scenario has this kind of fault.
    pub fn has(&self, kind: Kind) -> bool {
        self.chaos.iter().any(|trouble| trouble.kind == kind)
    }
}

/// Parses a duration: `300`, `300s`, `5m`, `1h`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = match text.find(|c: char| !c.is_ascii_digit()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let each = match unit {
        "s" => Some(1),
        "m" | "min" => Some(60),
        "h" => Some(3600),
        _ => None,
    };
    let seconds = each.zip(number.parse::<u64>().ok()).and_then(|(each, number)| number.checked_mul(each));
    // A soak of more than a year is a typing error.
    match seconds.filter(|seconds| (1..=365 * 24 * 3600).contains(seconds)) {
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Err("a duration is a number of seconds, or a number with s, m or h: 300, 300s, 5m, 1h".into()),
    }
}

fn length<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    duration(&String::deserialize(from)?).map_err(serde::de::Error::custom)
}

fn seconds<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    length(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Scenario> {
        let scenario: Scenario = toml::from_str(text)?;
        scenario.check()?;
        Ok(scenario)
    }

    #[test]
    fn durations_are_written_as_people_write_them() {
        for (text, seconds) in [("300", 300), ("300s", 300), ("5m", 300), ("5min", 300), ("1h", 3600)] {
            assert_eq!(duration(text).unwrap().as_secs(), seconds, "{text}");
        }
        for wrong in ["", "m", "5 m", "-1", "1.5h", "0", "5d", "99999999999999999999", "18446744073709551615h"] {
            assert!(duration(wrong).unwrap_err().contains("5m"), "{wrong}");
        }
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_defaults() {
        let file = read("[crowd]\nclients = 8\nduration = \"5m\"\nmix = { stream = 4, giant = 1 }\n").unwrap().crowd;
        let flags = Load { clients: Some(3), ..Load::default() };
        let crowd = flags.over(&file).unwrap();
        assert_eq!((crowd.clients, crowd.duration.as_secs(), crowd.seed), (3, 300, 1));
        let mut parts: Vec<String> = crowd.mix.to_string().split(',').map(str::to_owned).collect();
        parts.sort();
        assert_eq!(parts, ["giant=1", "stream=4"]);
        assert!(Load { clients: Some(0), ..Load::default() }.over(&file).is_err());
    }

    #[test]
    fn what_means_nothing_is_refused_by_name() {
        let trouble = |rest: &str| read(&format!("[[chaos]]\nfirst = \"1s\"\nhold = \"1s\"\npause = \"1s\"\n{rest}"));
        assert!(trouble("kind = \"stop\"").is_ok() && trouble("kind = \"busy\"\ncount = 2").is_ok());
        for (text, word) in [
            ("kind = \"earthquake\"", "earthquake"),
            ("kind = \"busy\"", "missing"),
            ("kind = \"stop\"\ncount = 2", "means nothing"),
            ("kind = \"flood\"\ncount = 0", "1 to"),
            ("kind = \"balloon\"", "leave-mib"),
            ("kind = \"stop\"\nleave-mib = [1]", "leave-mib"),
            ("kind = \"full-disk\"", "disk-mib"),
            ("kind = \"stop\"\nforce = 9", "force"),
        ] {
            let words = format!("{:#}", trouble(text).unwrap_err());
            assert!(words.contains(word), "{text}: {words}");
        }
        assert!(format!("{:#}", read("[crowd]\ncustomers = 8\n").unwrap_err()).contains("customers"));
    }
}
