//! The addresses of a host, found in time.

use std::{
    io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    sync::mpsc::channel,
    thread,
    time::Instant,
};

/// Where `host`, a name or an address, listens on `port`.
///
/// The system looks names up as long as it pleases, so a thread waits for it, which ends some time later.
pub(super) fn resolve(host: &str, port: u16, until: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let host = host.to_owned();
    in_time(until, move || {
        Ok((host.as_str(), port).to_socket_addrs()?.collect())
    })
}

fn in_time<T: Send + 'static>(
    until: Instant,
    look_up: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (answer, answered) = channel();
    thread::Builder::new()
        .name("name lookup".to_owned())
        .spawn(move || {
            // Nobody waits for it any more if this fails.
            drop(answer.send(look_up()));
        })?;
    let left = until.saturating_duration_since(Instant::now());
    answered.recv_timeout(left).unwrap_or_else(|_late| {
        Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the lookup of its name did not end",
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_address_is_taken_as_it_is_and_a_name_is_looked_up() {
        let now = Instant::now();
        let v6 = resolve("fd00::1", 80, now).unwrap();
        assert_eq!(v6, [SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 1], 80))]);
        let soon = now + Duration::from_secs(60);
        let found = resolve("localhost", 80, soon).unwrap();
        assert!(found.iter().all(|address| address.ip().is_loopback()));
        assert!(!found.is_empty());
    }

    #[test]
    fn a_lookup_that_does_not_end_is_not_waited_for() {
        let start = Instant::now();
        let long = Duration::from_secs(60);
        let result = in_time(start + Duration::from_millis(50), move || {
            thread::sleep(long);
            Ok(())
        });
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < long / 2, "{:?}", start.elapsed());
    }
}
