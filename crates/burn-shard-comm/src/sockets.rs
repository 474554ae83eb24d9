//! What the rendezvous and the TCP transport both do with sockets: wait, and set options.

use std::{
    io,
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::sockopt,
};

/// Waits until one of `fds` is ready or `timeout` has passed, whichever comes first.
pub(crate) fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    if fds.is_empty() {
        // On Windows it would be an error, elsewhere the time passes.
        thread::sleep(timeout);
        return Ok(());
    }
    // A time that the system's type cannot hold has no end that anybody sees.
    let timeout = Timespec::try_from(timeout).ok();
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Waits for one socket, see [`wait`].
pub(crate) fn wait_for(stream: &TcpStream, flags: PollFlags, timeout: Duration) -> io::Result<()> {
    wait(&mut [PollFd::new(stream, flags)], timeout)
}

/// What is left until `until`, at most `slice`; `None` when it has passed.
pub(crate) fn slice(until: Instant, slice: Duration) -> Option<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    (!left.is_zero()).then_some(left.min(slice))
}

/// Whether an operation on a socket may be tried again at once or later.
pub(crate) fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// No delay for small messages, no waiting in system calls.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)
}

/// Lets the system find out in about half a minute that the other host is gone.
///
/// For connections that carry little: the limit on unacknowledged bytes also counts while a reader is
/// busy elsewhere.
pub(crate) fn watch_over(stream: &TcpStream) -> io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepcnt(stream, 4)?;
    #[cfg(target_os = "linux")]
    sockopt::set_tcp_user_timeout(stream, 30_000)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_no_socket_lasts_its_time() {
        let (start, time) = (Instant::now(), Duration::from_millis(20));
        wait(&mut [], time).unwrap();
        assert!(start.elapsed() >= time);
    }
}
