//! Signals that end the process by default, where an error would do.

/// A write that goes beyond the limit on files' sizes (`ulimit -f`) is an error from here on, as on a full disk: the log's line or the
/// trace's is lost, and nothing else.
pub fn outlive_file_limits() {
    #[cfg(unix)]
    // SAFETY: `signal` takes any signal and one of its constants.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
    }
}

/// A request to end (SIGTERM, SIGINT, SIGHUP) has no effect from here on. For a child process that ends with its parent.
pub fn ignore_termination() {
    #[cfg(unix)]
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: `signal` takes any signal and one of its constants.
        unsafe {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}
