//! Checks before a model is loaded: the address to listen on, and the file of a trace.

use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::path::Path;

use plimsoll_server::ServerConfig;

/// Tries to listen with the server's own socket, so that an address in use is an error before a model is loaded.
pub fn try_address(config: &ServerConfig) -> anyhow::Result<()> {
    // A passed socket listens already. It stays for the server.
    if plimsoll_server::has_passed_socket() {
        return Ok(plimsoll_server::check_passed_socket()?);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(plimsoll_server::bind(config)).map(drop)?)
}

/// Returns a warning if the server needs no API key and is reachable from other machines.
pub fn open_to_all(config: &ServerConfig) -> Option<String> {
    // The socket of a service manager may listen anywhere.
    let passed = plimsoll_server::has_passed_socket();
    let local = config.host == "localhost" || config.host.parse::<IpAddr>().is_ok_and(|host| host.is_loopback());
    let open = config.api_keys.is_empty() && (passed || !local);
    let place = if passed { "the service manager's socket".to_owned() } else { config.address() };
    open.then(|| format!("no API key is set: every client that reaches {place} may use it"))
}

/// Returns why no trace can be recorded in this file. It looks at the path and writes nothing.
pub fn unrecordable(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Some(format!("there is no directory {}", folder.display()));
    }
    let other = file.exists() && !file.is_file();
    other.then(|| "a directory or a device is there, where a file is wanted".into())
}

/// Writes a small file beside the trace and removes it, so that a full disk is an error before a model is loaded.
pub fn try_record(file: &Path) -> anyhow::Result<()> {
    if let Some(why) = unrecordable(file) {
        anyhow::bail!(why);
    }
    let mut beside = file.as_os_str().to_owned();
    beside.push(".try");
    let written = File::create_new(&beside)?.write_all(&[0; 4096]);
    std::fs::remove_file(&beside)?;
    Ok(written?)
}
