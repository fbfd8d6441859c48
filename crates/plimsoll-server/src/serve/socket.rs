//! A client's socket: its options, and reads and writes with time limits.

use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

use crate::state::config::SOCKET_BUFFER_BYTES;

/// If a client is answered while it is still sending, its input is read for this long. Closing a socket with unread
/// input would make the system discard the answer.
pub(crate) const LINGER: Duration = Duration::from_secs(2);

/// Sets the options of an accepted connection.
pub(crate) fn prepare(stream: &TcpStream, write_timeout: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    // Kernel memory counts against the memory limit: without this it grows to megabytes per slow reader.
    socket.set_send_buffer_size(SOCKET_BUFFER_BYTES)?;
    // Detects a vanished peer: sent data and keep-alive probes both give up after the write timeout. Two probes stay unanswered.
    let tick = (write_timeout / 4).max(Duration::from_secs(1));
    let probes = TcpKeepalive::new().with_time(2 * tick).with_interval(tick).with_retries(2);
    #[cfg(target_os = "linux")] // elsewhere what was sent has only the write timeout of `ClientSocket`
    socket.set_tcp_user_timeout(Some(write_timeout))?;
    socket.set_tcp_keepalive(&probes)
}

/// Returns whether the peer has closed its end, also when unread input hides it from reads.
#[cfg(target_os = "linux")]
pub(crate) fn hung_up(stream: &TcpStream) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    let mut fds = [PollFd::new(stream, gone)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0) && fds[0].revents().intersects(gone)
}

/// Always returns false: on other systems than Linux only reads and writes detect a closed peer.
#[cfg(not(target_os = "linux"))]
pub(crate) fn hung_up(_: &TcpStream) -> bool {
    false
}

/// Returns whether the peer has sent bytes that the server has not read yet.
pub(crate) fn has_unread(stream: &TcpStream) -> bool {
    SockRef::from(stream).peek(&mut [MaybeUninit::uninit()]).is_ok_and(|bytes| bytes > 0)
}

/// The socket of one client. A write fails when the client takes nothing for `write_timeout`. A shutdown after an early answer lingers.
pub(crate) struct ClientSocket {
    stream: Arc<TcpStream>,
    write_timeout: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
    /// Whether an answer was given before all input was read.
    unread: Arc<AtomicBool>,
    linger: Option<Pin<Box<Sleep>>>,
}

impl ClientSocket {
    pub fn new(stream: Arc<TcpStream>, write_timeout: Duration, unread: Arc<AtomicBool>) -> Self {
        Self { stream, write_timeout, stalled: None, unread, linger: None }
    }

    /// Runs `write` until it succeeds, the socket is full, or it has been full for too long.
    fn poll_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match self.stream.poll_write_ready(cx) {
                Poll::Pending => break,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) => {}
            }
            match write(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => {
                    self.stalled = None;
                    return Poll::Ready(done);
                }
            }
        }
        let timeout = self.write_timeout;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(stalled.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read(buf.initialize_unfilled()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl AsyncWrite for ClientSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |stream| stream.try_write(bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_written(cx, |stream| stream.try_write_vectored(slices))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Sends the end of the stream. Input of a client that is still sending is read and discarded for [`LINGER`].
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            SockRef::from(&*self.stream).shutdown(std::net::Shutdown::Write)?;
            if !self.unread.load(Ordering::Acquire) {
                return Poll::Ready(Ok(()));
            }
            self.linger = Some(Box::pin(sleep(LINGER)));
        }
        if let Some(linger) = &mut self.linger
            && linger.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Ok(()));
        }
        // A bounded number of reads a poll, so a fast sender does not block other tasks.
        let mut scratch = [0; 16 << 10];
        for _ in 0..16 {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read(&mut scratch) {
                Ok(0) => return Poll::Ready(Ok(())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
