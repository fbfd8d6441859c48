//! The user's data directory: history and saved conversations. Only the user may read them.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use super::attach::read_bounded;
use super::conversation::{CONVERSATION_BYTES_MAX, Conversation};
use crate::private_file;

/// Most bytes of a saved conversation's name.
const NAME_BYTES_MAX: usize = 64;

/// Most names that are listed.
const NAMES_MAX: usize = 1000;

/// `plimsoll` below `XDG_DATA_HOME`, or below `~/.local/share`; it is created.
///
/// # Errors
/// Neither variable is set, or the directory cannot be created.
pub fn directory() -> anyhow::Result<PathBuf> {
    let set = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || set("HOME").map(|home| home.join(".local/share"));
    let base = set("XDG_DATA_HOME").or_else(home);
    let path = base.context("no directory for data: set HOME or XDG_DATA_HOME")?.join("plimsoll");
    create(&path)?;
    Ok(path)
}

fn create(path: &Path) -> anyhow::Result<()> {
    let created = DirBuilder::new().recursive(true).mode(0o700).create(path);
    created.with_context(|| format!("creating {}", path.display()))
}

/// The directory of the saved conversations.
#[derive(Debug)]
pub struct Store(PathBuf);

impl Store {
    /// The conversations in `chats` below `directory`.
    pub fn below(directory: &Path) -> Self {
        Self(directory.join("chats"))
    }

    fn path(&self, name: &str) -> anyhow::Result<PathBuf> {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.starts_with('.') || !name.chars().all(plain) {
            bail!("'{name}' cannot be a name: use 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.'");
        }
        Ok(self.0.join(format!("{name}.json")))
    }

    /// Saves a conversation, replaces one of the same name, and returns the file.
    ///
    /// # Errors
    /// The name is invalid, or the file cannot be written.
    pub fn save(&self, name: &str, conversation: &Conversation) -> anyhow::Result<PathBuf> {
        let path = self.path(name)?;
        create(&self.0)?;
        let text = serde_json::to_vec(conversation)?;
        private_file::write(&path, &text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Reads a saved conversation.
    ///
    /// # Errors
    /// There is none of that name, or the file is not a saved conversation.
    pub fn load(&self, name: &str) -> anyhow::Result<Conversation> {
        let path = self.path(name)?;
        if !path.exists() {
            bail!("no conversation is kept as '{name}': /load lists those that are");
        }
        let text = read_bounded(&path, CONVERSATION_BYTES_MAX)?;
        serde_json::from_slice(&text).with_context(|| format!("{} is not a saved conversation", path.display()))
    }

    /// Names of all saved conversations, sorted.
    pub fn names(&self) -> Vec<String> {
        let files = fs::read_dir(&self.0).into_iter().flatten().flatten().take(NAMES_MAX);
        let name = |file: fs::DirEntry| {
            let name = file.file_name().into_string().ok()?.strip_suffix(".json")?.to_owned();
            (!name.starts_with('.')).then_some(name)
        };
        let mut names: Vec<_> = files.filter_map(name).collect();
        names.sort();
        names
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn conversation_is_kept_for_the_user_alone_and_found_again() {
        let folder = std::env::temp_dir().join(format!("plimsoll-store-{}", std::process::id()));
        let store = Store::below(&folder);
        assert!(store.names().is_empty());
        let mut conversation = Conversation::default();
        conversation.ask("hi", Vec::new());
        let path = store.save("first-1.a", &conversation).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(store.load("first-1.a").unwrap().messages, conversation.messages);
        assert_eq!(store.names(), ["first-1.a"]);
        for name in ["", "../x", "a/b", ".hidden", "ü", &"x".repeat(65)] {
            assert!(store.save(name, &conversation).unwrap_err().to_string().contains("cannot be a name"), "{name}");
        }
        assert!(store.load("second").unwrap_err().to_string().contains("/load"));
        fs::write(&path, "[]").unwrap();
        assert!(store.load("first-1.a").unwrap_err().to_string().contains("not a saved conversation"));
        fs::remove_dir_all(folder).unwrap();
    }
}
