//! Logs panics: their place, and their message only if it is a constant of the code. A formatted message may repeat a client's text
//! ("byte index 3 is not a char boundary; it is inside 'é' of `…`"), which must not be logged.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::Write;

use crate::log::Log;

/// Installs a panic hook that logs panics without the text of clients.
pub fn tell_without_content() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map_or_else(|| "somewhere".to_owned(), ToString::to_string);
        let thread = std::thread::current();
        let (name, words) = (thread.name().unwrap_or("unnamed"), words(panic.payload()));
        // As in the standard library's hook, only with RUST_BACKTRACE.
        let backtrace = Backtrace::capture();
        // A line that cannot be written is lost: a panic in the hook would end the process.
        let mut log = Log;
        let _ = match backtrace.status() {
            BacktraceStatus::Captured => {
                log.write(format!("thread '{name}' panicked at {place}: {words}\n{backtrace}\n").as_bytes())
            }
            _ => log.write(format!("thread '{name}' panicked at {place}: {words}\n").as_bytes()),
        };
    }));
}

fn words(payload: &(dyn Any + Send)) -> &'static str {
    payload.downcast_ref::<&'static str>().copied().unwrap_or("(its words may repeat a client's and are left out)")
}

#[cfg(test)]
mod tests {
    use super::words;

    #[test]
    fn only_constant_words_are_told() {
        let panic = |work: fn()| std::panic::catch_unwind(work).unwrap_err();
        assert_eq!(words(&*panic(|| panic!("a constant"))), "a constant");
        for work in [
            || panic!("it was {}", std::hint::black_box("sesame")),
            || assert!(std::hint::black_box("sésame").split_at(2).0.is_empty()),
            || assert_eq!(std::hint::black_box("sesame").parse::<u8>().unwrap(), 0),
        ] as [fn(); 3]
        {
            assert!(!words(&*panic(work)).contains("sesame"));
        }
        // The standard library's own message repeats the text.
        let words =
            *panic(|| assert!(std::hint::black_box("sésame").split_at(2).0.is_empty())).downcast::<String>().unwrap();
        assert!(words.contains("sésame"), "{words}");
    }
}
