//! Finds the process that listens at an address of this machine, from `/proc`, so that `--pid` need not be given.

use std::fs;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::Path;

/// Finds the process that listens at `host:port`; none if the address is not loopback or no such process is found.
pub fn listener(authority: &str) -> Option<u32> {
    let local = |address: &SocketAddr| address.ip().is_loopback();
    let address = authority.to_socket_addrs().ok()?.find(local)?;
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].into_iter().filter_map(|path| fs::read_to_string(path).ok());
    let inodes: Vec<String> = tables.flat_map(|table| listening(&table, address.port())).collect();
    holder(&inodes)
}

/// Returns the inodes of the sockets in a table of `/proc/net` that listen on `port`.
fn listening(table: &str, port: u16) -> Vec<String> {
    let entry = |line: &str| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let here = u16::from_str_radix(words.get(1)?.rsplit_once(':')?.1, 16).ok()?;
        // 0A is the state of a socket that listens.
        (here == port && *words.get(3)? == "0A").then(|| words.get(9).map(|inode| (*inode).to_owned()))?
    };
    table.lines().filter_map(entry).collect()
}

/// Finds a process that holds one of these sockets.
fn holder(inodes: &[String]) -> Option<u32> {
    let links: Vec<String> = inodes.iter().map(|inode| format!("socket:[{inode}]")).collect();
    let holds = |process: &Path| {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut targets = files.filter_map(|file| fs::read_link(file.path()).ok());
        targets.any(|target| links.iter().any(|link| target == Path::new(link)))
    };
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut numbered = processes.filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())));
    numbered.find(|(_, path)| holds(path)).map(|(pid, _)| pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_this_process_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let authority = socket.local_addr().unwrap().to_string();
        assert_eq!(listener(&authority), Some(std::process::id()));
        drop(socket);
        assert_eq!(listener(&authority), None);
        assert_eq!(listener("192.0.2.1:80"), None, "not this machine");
    }
}
