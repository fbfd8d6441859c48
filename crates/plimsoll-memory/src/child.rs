//! Child processes that work on a client's bytes: start, set-up and end.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command};

/// A child process that is killed when this value is dropped.
#[derive(Debug)]
pub struct OwnedChild(Child);

impl From<Child> for OwnedChild {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Deref for OwnedChild {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for OwnedChild {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for OwnedChild {
    fn drop(&mut self) {
        // Both calls fail only for a process that has ended and been waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Gives a child an empty environment, so that it has no keys; `/` as its directory, so that it blocks no unmount; and a process group
/// of its own, so that signals from the terminal do not reach it.
pub fn isolate(command: &mut Command) -> &mut Command {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    command.env_clear().current_dir("/")
}

/// Sets up a child of this program as its first step. From now on a panic prints no message, and SIGTERM, SIGINT and SIGHUP are ignored. On
/// Linux the child is killed when its server ends, and `ps` shows `name`.
pub fn begin(name: &std::ffi::CStr) {
    std::panic::set_hook(Box::new(|_| {}));
    crate::signals::ignore_termination();
    #[cfg(target_os = "linux")]
    {
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        let _ = rustix::thread::set_name(name);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = name;
}

#[cfg(all(test, unix))]
mod tests {
    use std::process::Stdio;

    use super::*;

    #[test]
    fn an_isolated_child_sees_nothing_and_ends_with_its_value() {
        let output = isolate(Command::new("/bin/sh").args(["-c", "pwd; echo \"<$HOME>\""])).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "/\n<>\n");
        let mut command = Command::new("/bin/sh");
        let mut child =
            OwnedChild::from(isolate(command.args(["-c", "exec sleep 60"])).stdout(Stdio::piped()).spawn().unwrap());
        let mut pipe = child.stdout.take().unwrap();
        drop(child);
        // The child's end of the pipe is closed.
        assert_eq!(std::io::Read::read(&mut pipe, &mut [0]).unwrap(), 0);
    }
}
