//! Checks before a model is loaded: the address to listen on, and the file of a trace.

use std::fs::File;
use std::io::Write;
use std::net::IpAddr;
use std::path::Path;

use plimsoll_server::ServerConfig;

/// Whether the server could listen, tried with its own socket: that an address is taken is known before a model is loaded, not after.
pub fn try_address(config: &ServerConfig) -> anyhow::Result<()> {
    // A passed socket listens already. It stays for the server.
    if plimsoll_server::has_passed_socket() {
        return Ok(plimsoll_server::check_passed_socket()?);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(plimsoll_server::bind(config)).map(drop)?)
}

/// What is to be said of a server that others than this machine's users may ask, each of them without a key.
pub fn open_to_all(config: &ServerConfig) -> Option<String> {
    // The socket of a service manager may listen anywhere.
    let passed = plimsoll_server::has_passed_socket();
    let local = config.host == "localhost" || config.host.parse::<IpAddr>().is_ok_and(|host| host.is_loopback());
    let open = config.api_keys.is_empty() && (passed || !local);
    let place = if passed { "the service manager's socket".to_owned() } else { config.address() };
    open.then(|| format!("no API key is set: every client that reaches {place} may use it"))
}

/// Why no trace can be recorded in this file, as far as looking tells.
pub fn unrecordable(file: &Path) -> Option<String> {
    let folder = file.parent().filter(|folder| *folder != Path::new(""));
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Some(format!("there is no directory {}", folder.display()));
    }
    let other = file.exists() && !file.is_file();
    other.then(|| "a directory or a device is there, where a file is wanted".into())
}

/// What cannot be written, on a full disk for instance, is found before a model is loaded.
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
