//! Signals that would end the process where an error is enough.

/// Ignores SIGXFSZ. A write beyond the limit on file sizes (`ulimit -f`) is then an error, as on a full disk: only that line of the log or
/// the trace is lost.
pub fn outlive_file_limits() {
    #[cfg(unix)]
    // SAFETY: `signal` takes any signal and one of its constants.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// Ignores requests to end (SIGTERM, SIGINT, SIGHUP) from now on. For a child process that ends with its parent.
pub fn ignore_termination() {
    #[cfg(unix)]
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: `signal` takes any signal and one of its constants.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}
