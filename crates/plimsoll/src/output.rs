//! Standard output of commands. A reader that closes the pipe early (`plimsoll plan | head`) is no error.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// Prints a line, as `println!` does.
macro_rules! say {
    ($($words:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($words)*))) };
}

/// Prints without ending the line, and flushes.
macro_rules! say_part {
    ($($words:tt)*) => { $crate::output::write(format_args!($($words)*)) };
}

/// Prints a line to standard error, for a user at a terminal. A write that fails loses the line and nothing else.
macro_rules! tell {
    ($($words:tt)*) => { $crate::output::write_aside(format_args!("{}\n", format_args!($($words)*))) };
}

pub(crate) use {say, say_part, tell};

/// Writes to standard error.
pub fn write_aside(words: Arguments<'_>) {
    let _ = std::io::stderr().lock().write_fmt(words);
}

/// Prints a line that another crate hands over.
pub fn print(line: Arguments<'_>) {
    write(format_args!("{line}\n"));
}

/// Writes to standard output. If the write fails, it ends the process: with success if the reader closed the pipe, else
/// with the error.
pub fn write(words: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(error) = out.write_fmt(words).and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    crate::log::last_words(&format!("standard output: {error}"));
    std::process::exit(1);
}
