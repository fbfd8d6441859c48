//! A small HTTP client: one request per connection, plain or chunked answers, events read as they arrive.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// No test waits longer than this for the next byte.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sends a request and reads the head of the answer.
pub fn request(address: SocketAddr, method: &str, path: &str, body: &[u8]) -> std::io::Result<Answer> {
    request_of(address, method, path, "application/json", body)
}

/// As [`request`], with a body of any type.
pub fn request_of(address: SocketAddr, method: &str, path: &str, kind: &str, body: &[u8]) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: {kind}\r\n\
         content-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes())?;
    // The server may close the connection to a body that is too long. Its answer can still be read.
    let _ = stream.write_all(body);
    Answer::read(stream)
}

/// An answer with its head already read.
pub struct Answer {
    pub status: u16,
    headers: Vec<(String, String)>,
    body: BufReader<Body>,
}

impl Answer {
    /// Reads the head of an answer from a connection.
    pub fn read(stream: TcpStream) -> std::io::Result<Self> {
        let mut stream = BufReader::new(stream);
        let status = line(&mut stream)?;
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        let status = status.ok_or_else(|| std::io::Error::other("no status line"))?;
        let mut headers = Vec::new();
        loop {
            let header = line(&mut stream)?;
            let Some((name, value)) = header.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let value = |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
        let framing = match (value("transfer-encoding"), value("content-length").map(str::parse)) {
            (Some("chunked"), _) => Framing::Chunked { left: 0, first: true },
            (_, Some(Ok(length))) => Framing::Length(length),
            _ => return Err(std::io::Error::other("an answer without a length")),
        };
        Ok(Self { status, headers, body: BufReader::new(Body { stream, framing }) })
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The whole body as text.
    pub fn text(mut self) -> String {
        let mut text = String::new();
        self.body.read_to_string(&mut text).expect("the body arrives whole");
        text
    }

    /// The whole body as JSON.
    pub fn json(self) -> Value {
        let text = self.text();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// The data of the next event; none at the end of the stream.
    pub fn event(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.body.read_line(&mut line).expect("the stream goes on") == 0 {
                return None;
            }
            // Comments only keep the connection alive.
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return Some(data.to_owned());
            }
        }
    }
}

fn line(stream: &mut impl BufRead) -> std::io::Result<String> {
    let mut line = String::new();
    match stream.read_line(&mut line)? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line.trim_end().to_owned()),
    }
}

enum Framing {
    Length(u64),
    Chunked { left: u64, first: bool },
}

/// The bytes after the head, without their framing.
struct Body {
    stream: BufReader<TcpStream>,
    framing: Framing,
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if let Framing::Chunked { left: 0, first } = self.framing {
            if !first {
                line(&mut self.stream)?;
            }
            let size = line(&mut self.stream)?;
            let left = u64::from_str_radix(&size, 16).map_err(|_| std::io::Error::other("no chunk size"))?;
            if left == 0 {
                self.framing = Framing::Length(0);
            } else {
                self.framing = Framing::Chunked { left, first: false };
            }
        }
        let (Framing::Length(left) | Framing::Chunked { left, .. }) = &mut self.framing;
        let most = buffer.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
        let read = self.stream.read(&mut buffer[..most])?;
        if read == 0 && most > 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        *left -= read as u64;
        Ok(read)
    }
}
