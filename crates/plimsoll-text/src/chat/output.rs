//! The limit on the bytes that one rendering may write.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use minijinja::{Environment, Output};

use super::python;

/// The bytes that a rendering may still write, captured text (`{% set %}`, macros) included. Negative once it has written more.
#[derive(Clone)]
pub(super) struct OutputLimit(Arc<AtomicI64>);

impl OutputLimit {
    /// Makes `environment` print values as Python does, `bytes` bytes at most.
    pub(super) fn install(environment: &mut Environment<'static>, bytes: usize) -> Self {
        let limit = Self(Arc::new(AtomicI64::new(i64::try_from(bytes).unwrap_or(i64::MAX))));
        let counted = limit.clone();
        environment.set_formatter(move |out, _, value| python::write_str(&mut Counted { out, limit: &counted }, value));
        limit
    }

    /// Whether the rendering tried to write more than the limit.
    pub(super) fn exceeded(&self) -> bool {
        self.0.load(Ordering::Relaxed) < 0
    }
}

/// The output of a rendering, which fails at the limit.
struct Counted<'a, 'o> {
    out: &'a mut Output<'o>,
    limit: &'a OutputLimit,
}

impl fmt::Write for Counted<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let length = i64::try_from(text.len()).map_err(|_| fmt::Error)?;
        if self.limit.0.fetch_sub(length, Ordering::Relaxed) < length {
            return Err(fmt::Error);
        }
        self.out.write_str(text)
    }
}
