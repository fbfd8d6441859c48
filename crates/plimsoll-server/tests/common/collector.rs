//! A collector of OTLP traces on a loopback port, which decodes protobuf without a library and can misbehave.

use std::collections::BTreeMap;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::request::next_request;

/// How the collector answers an export.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    Takes,
    /// Answers with this status.
    Answers(u16),
    /// Never answers.
    Hangs,
    /// Answers that it rejected this many spans.
    Rejects(u8),
}

/// One span.
#[derive(Clone, Debug, Default)]
pub struct Span {
    pub trace: String,
    pub id: String,
    pub parent: String,
    pub name: String,
    pub kind: u64,
    pub start: u64,
    pub end: u64,
    pub attributes: BTreeMap<String, String>,
    pub status: u64,
    pub flags: u64,
}

impl Span {
    pub fn ms(&self) -> f64 {
        (self.end - self.start) as f64 / 1e6
    }

    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.get(name).map(String::as_str)
    }
}

#[derive(Default)]
pub struct Seen {
    pub heads: Vec<String>,
    pub resources: Vec<BTreeMap<String, String>>,
    pub spans: Vec<Span>,
    pub bodies: Vec<Vec<u8>>,
}

pub struct Collector {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Seen>>,
    manner: Arc<Mutex<Manner>>,
}

impl Collector {
    pub fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, manner) = (Arc::<Mutex<Seen>>::default(), Arc::new(Mutex::new(manner)));
        let (taken, how) = (Arc::clone(&seen), Arc::clone(&manner));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (taken, how) = (Arc::clone(&taken), Arc::clone(&how));
                std::thread::spawn(move || connection(stream.unwrap(), &taken, &how));
            }
        });
        Self { address, seen, manner }
    }

    pub fn becomes(&self, manner: Manner) {
        *self.manner.lock().unwrap() = manner;
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn spans(&self) -> Vec<Span> {
        self.seen.lock().unwrap().spans.clone()
    }

    pub fn exports(&self) -> usize {
        self.seen.lock().unwrap().heads.len()
    }
}

fn connection(mut stream: TcpStream, seen: &Mutex<Seen>, manner: &Mutex<Manner>) {
    let mut bytes = Vec::new();
    while let Some((head, body)) = next_request(&mut stream, &mut bytes) {
        assert!(head.contains("content-length: "), "{head}");
        let how = *manner.lock().unwrap();
        let mut said = Vec::new();
        let status = match how {
            Manner::Hangs => {
                seen.lock().unwrap().heads.push(head);
                std::thread::sleep(Duration::from_secs(3600));
                return;
            }
            Manner::Answers(status) => status,
            Manner::Takes => 200,
            Manner::Rejects(spans) => {
                // partial_success { rejected_spans }
                said = vec![0x0a, 2, 0x08, spans];
                200
            }
        };
        {
            let mut seen = seen.lock().unwrap();
            seen.heads.push(head);
            if status == 200 {
                take(&body, &mut seen);
                seen.bodies.push(body);
            }
        }
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {}\r\n\r\n", said.len());
        if stream.write_all(&[answer.as_bytes(), &said].concat()).is_err() {
            return;
        }
    }
}

/// A field's value on the wire.
enum Wire<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl Wire<'_> {
    fn number(&self) -> u64 {
        match self {
            Wire::Number(number) => *number,
            Wire::Bytes(_) => panic!("bytes where a number belongs"),
        }
    }
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first().unwrap();
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            break;
        }
    }
    value
}

/// Returns the fields of a message.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Wire<'_>)> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let fixed = |bytes: &mut &[u8], n: usize| {
            let (value, rest) = bytes.split_at(n);
            *bytes = rest;
            value.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let value = match key & 7 {
            0 => Wire::Number(varint(&mut bytes)),
            1 => Wire::Number(fixed(&mut bytes, 8)),
            5 => Wire::Number(fixed(&mut bytes, 4)),
            2 => {
                let n = varint(&mut bytes) as usize;
                let (value, rest) = bytes.split_at(n);
                bytes = rest;
                Wire::Bytes(value)
            }
            kind => panic!("wire type {kind}"),
        };
        all.push((key >> 3, value));
    }
    all
}

/// Returns the messages of one field.
fn messages(bytes: &[u8], field: u64) -> Vec<&[u8]> {
    let of = |(number, value)| match value {
        Wire::Bytes(bytes) if number == field => Some(bytes),
        _ => None,
    };
    fields(bytes).into_iter().filter_map(of).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn any(bytes: &[u8]) -> String {
    let Some((number, value)) = fields(bytes).pop() else { return String::new() };
    match (number, value) {
        (1, Wire::Bytes(bytes)) => text(bytes),
        (2, Wire::Number(flag)) => (flag == 1).to_string(),
        (3, Wire::Number(number)) => (number as i64).to_string(),
        (4, Wire::Number(bits)) => f64::from_bits(bits).to_string(),
        (5, Wire::Bytes(bytes)) => messages(bytes, 1).into_iter().map(any).collect::<Vec<_>>().join(","),
        (number, _) => panic!("value {number}"),
    }
}

fn attributes(bytes: &[u8], field: u64) -> BTreeMap<String, String> {
    let pair = |bytes: &&[u8]| (text(messages(bytes, 1)[0]), any(messages(bytes, 2)[0]));
    messages(bytes, field).iter().map(pair).collect()
}

fn take(body: &[u8], seen: &mut Seen) {
    for resource_spans in messages(body, 1) {
        seen.resources.push(attributes(messages(resource_spans, 1)[0], 1));
        for scope_spans in messages(resource_spans, 2) {
            seen.spans.extend(messages(scope_spans, 2).into_iter().map(span));
        }
    }
}

fn span(bytes: &[u8]) -> Span {
    let mut span = Span { attributes: attributes(bytes, 9), ..Span::default() };
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    for (number, value) in fields(bytes) {
        match (number, value) {
            (1, Wire::Bytes(id)) => span.trace = hex(id),
            (2, Wire::Bytes(id)) => span.id = hex(id),
            (4, Wire::Bytes(id)) => span.parent = hex(id),
            (5, Wire::Bytes(name)) => span.name = text(name),
            (6, value) => span.kind = value.number(),
            (7, value) => span.start = value.number(),
            (8, value) => span.end = value.number(),
            (15, Wire::Bytes(status)) => {
                span.status =
                    fields(status).iter().find(|(number, _)| *number == 3).map_or(0, |(_, code)| code.number());
            }
            (16, value) => span.flags = value.number(),
            _ => {}
        }
    }
    span
}
