//! Standard output for commands that print and end: whoever stops reading (`plimsoll plan | head`) has had enough, which is no error.

use std::fmt::Arguments;
use std::io::{ErrorKind, Write};

/// Prints a line, as `println!` does.
macro_rules! say {
    ($($words:tt)*) => { $crate::output::write(format_args!("{}\n", format_args!($($words)*))) };
}

/// Prints without ending the line, at once.
macro_rules! say_part {
    ($($words:tt)*) => { $crate::output::write(format_args!($($words)*)) };
}

pub(crate) use {say, say_part};

/// Writes to standard output. Ends the process where that cannot be done: well where nobody reads any more, else with the reason.
pub fn write(words: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    let Err(error) = out.write_fmt(words).and_then(|()| out.flush()) else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    crate::log::last_words(&format!("standard output: {error}"));
    std::process::exit(1);
}
