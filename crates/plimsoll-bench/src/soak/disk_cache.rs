//! The directory of the server's prefix cache on disk: the size of its files, sampled every second.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::client::Target;

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A file takes whole blocks of the disk.
const BLOCK_BYTES: u64 = 4096;

/// The location of the cache and its size limit.
#[derive(Clone, Debug)]
pub struct DiskCache {
    /// The directory.
    pub dir: PathBuf,
    /// Its size limit in bytes.
    pub bytes: u64,
}

/// The observations of a [`DiskWatch`].
#[derive(Clone, Debug, Default, Serialize)]
pub struct DiskSeen {
    /// The size limit in bytes.
    pub limit: u64,
    /// The largest total size of its files in bytes.
    pub most: u64,
    /// Number of samples.
    pub looks: u64,
    /// The `disk` part of `/v1/cache` at the end; null without an answer.
    pub report: Value,
}

/// A running watch.
pub struct DiskWatch {
    stop: watch::Sender<bool>,
    looks: JoinHandle<DiskSeen>,
}

impl DiskWatch {
    /// Starts the samples.
    pub fn start(cache: DiskCache) -> Self {
        let (stop, stopped) = watch::channel(false);
        let looks = tokio::spawn(async move {
            let mut seen = DiskSeen { limit: cache.bytes, ..DiskSeen::default() };
            while !*stopped.borrow() {
                let dir = cache.dir.join("blobs");
                let taken = tokio::task::spawn_blocking(move || taken(&dir)).await.unwrap_or_default();
                seen.most = seen.most.max(taken);
                seen.looks += 1;
                sleep(LOOK_EVERY).await;
            }
            seen
        });
        Self { stop, looks }
    }

    /// Ends the samples and reads the server's own counts.
    pub async fn stop(self, target: &Target) -> DiskSeen {
        self.stop.send_replace(true);
        let seen = self.looks.await.unwrap_or_default();
        let asked = async { target.get("/v1/cache", Duration::from_secs(30)).await?.json().await };
        let report = asked.await.map_or(Value::Null, |page: Value| page["disk"].clone());
        DiskSeen { report, ..seen }
    }
}

/// Returns the bytes of the files below a directory, in whole blocks. Only files that two passes in a row both find are counted: a
/// single pass would count files that are created while others are deleted.
fn taken(dir: &Path) -> u64 {
    let (mut before, mut after) = (HashMap::new(), HashMap::new());
    look(dir, &mut before);
    look(dir, &mut after);
    before.iter().filter(|(path, _)| after.contains_key(*path)).map(|(_, bytes)| bytes).sum()
}

fn look(dir: &Path, files: &mut HashMap<PathBuf, u64>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => look(&entry.path(), files),
            Ok(metadata) => drop(files.insert(entry.path(), metadata.len().next_multiple_of(BLOCK_BYTES))),
            // The file was deleted meanwhile.
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_take_whole_blocks_in_every_folder() {
        let dir = std::env::temp_dir().join(format!("plimsoll-soak-taken-{}", std::process::id()));
        fs::create_dir_all(dir.join("00")).unwrap();
        fs::write(dir.join("00/a"), [0; 4097]).unwrap();
        fs::write(dir.join("b.tmp"), [0; 1]).unwrap();
        assert_eq!((taken(&dir), taken(&dir.join("none"))), (3 * 4096, 0));
        fs::remove_dir_all(dir).unwrap();
    }
}
