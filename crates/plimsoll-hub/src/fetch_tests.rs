use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::*;

/// Starts a server on an address of the loopback network. It gives every connection this answer, and counts connections.
fn server(address: &str, answer: impl Fn(&str) -> String + Send + 'static) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    thread::spawn(move || {
        let mut silent = Vec::new();
        for mut stream in listener.incoming().flatten() {
            count.fetch_add(1, Ordering::SeqCst);
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            let _ = stream.write_all(answer(line.split(' ').nth(1).unwrap_or_default()).as_bytes());
            if line.contains("silence") {
                silent.push(stream);
            }
        }
    });
    (url, asked)
}

fn file(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

fn moved(to: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n")
}

fn rules() -> FetchRules {
    FetchRules { private: true, hosts: Vec::new(), timeout: Duration::from_secs(2) }
}

fn get(fetcher: &Fetcher, url: &str, limit: u64) -> Result<String, FetchError> {
    let mut bytes = Vec::new();
    fetcher.fetch(url, limit, |piece| {
        bytes.extend_from_slice(piece);
        true
    })?;
    Ok(String::from_utf8(bytes).unwrap())
}

#[test]
fn files_come_whole_up_to_the_limit_and_no_further() {
    let (url, _) = server("127.0.0.1", |path| match path {
        "/open" => "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nabcdefgh".into(),
        "/gone?key=secret" => "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".into(),
        "/short" => "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc".into(),
        "/silence" => "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc".into(),
        "/head" => format!("HTTP/1.1 200 OK\r\nx: {}\r\ncontent-length: 1\r\n\r\na", "y".repeat(1 << 20)),
        _ => file("abcdefgh"),
    });
    let fetcher = Fetcher::new(&rules(), None).unwrap();
    assert_eq!(get(&fetcher, &format!("{url}/a?b=c#d"), 8).as_deref(), Ok("abcdefgh"));
    assert_eq!(get(&fetcher, &format!("{url}/open"), 8).as_deref(), Ok("abcdefgh"));
    let over = |at_least| Err(FetchError::TooLarge { bytes: 8, at_least, limit: 7 });
    assert_eq!(get(&fetcher, &url, 7), over(false));
    assert_eq!(get(&fetcher, &format!("{url}/open"), 7), over(true));
    let gone = get(&fetcher, &format!("{url}/gone?key=secret"), 8).unwrap_err();
    assert_eq!(gone.to_string(), "`127.0.0.1` answered with status 404");
    for path in ["short", "head"] {
        let broken = get(&fetcher, &format!("{url}/{path}"), 200).unwrap_err();
        assert!(matches!(&broken, FetchError::Failed { host, .. } if host == "127.0.0.1"), "{path}: {broken}");
    }
    let slow = Err(FetchError::TooSlow { host: "127.0.0.1".into(), limit: Duration::from_secs(2) });
    assert_eq!(get(&fetcher, &format!("{url}/silence"), 200), slow);
    assert_eq!(fetcher.fetch(&url, 8, |_| false), Err(FetchError::Stopped));
}

#[test]
fn what_is_no_address_of_a_file_is_refused_before_anything_is_asked() {
    let fetcher = Fetcher::new(&rules(), None).unwrap();
    let long = format!("http://x/{}", "a".repeat(5000));
    for bad in [
        "",
        "x",
        "/etc/passwd",
        "file:///etc/passwd",
        "ftp://x/y",
        "http://",
        "http://:80/",
        "http://a@b/",
        "gopher://x",
        &long,
    ] {
        assert!(matches!(get(&fetcher, bad, 8), Err(FetchError::BadAddress(_))), "{bad}");
    }
}

#[test]
fn private_addresses_are_not_asked_whatever_they_are_called() {
    let (url, asked) = server("127.0.0.1", |_| file("secret"));
    let port = url.rsplit(':').next().unwrap();
    let fetcher = Fetcher::new(&FetchRules { private: false, ..rules() }, None).unwrap();
    for host in ["127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1", "2130706433", "0x7f.1"] {
        let refused = get(&fetcher, &format!("http://{host}:{port}/"), 8).unwrap_err();
        let known = matches!(&refused, FetchError::Forbidden { why, .. } if why.contains("--media-fetch"));
        // Some systems reject some of these spellings as a name.
        assert!(known || matches!(refused, FetchError::Failed { .. }), "{host}: {refused}");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 0);
}

#[test]
fn a_redirect_leads_only_to_where_one_might_have_gone_at_once() {
    let (inner, inside) = server("127.0.0.2", |_| file("secret"));
    let elsewhere = inner.clone();
    let (outer, _) = server("127.0.0.1", move |path| match path {
        "/in" => moved(&format!("{elsewhere}/")),
        "/file" => moved("file:///etc/passwd"),
        "/loop" => moved("/loop"),
        "/once" => moved("/there"),
        "/a/b?c" => moved("d"),
        "/nowhere" => moved(""),
        "/script" => moved("javascript:alert(1)"),
        "/gopher" => moved("gopher://127.0.0.1/"),
        "/hostless" => moved("http://:80/"),
        "/credentials" => moved("http://a:b@127.0.0.1/"),
        _ => file("open"),
    });
    // As if one of the two addresses were public.
    let one = |address: IpAddr| address == IpAddr::V4(Ipv4Addr::LOCALHOST);
    let fetcher = Fetcher::reaching(&rules(), None, one).unwrap();
    assert_eq!(get(&fetcher, &format!("{outer}/once"), 8).as_deref(), Ok("open"));
    assert!(matches!(get(&fetcher, &format!("{outer}/in"), 8), Err(FetchError::Forbidden { .. })));
    assert!(matches!(get(&fetcher, &inner, 8), Err(FetchError::Forbidden { .. })));
    assert_eq!(get(&fetcher, &format!("{outer}/a/b?c"), 8).as_deref(), Ok("open"));
    // A location with a scheme is no path of the same server.
    for (path, why) in [
        ("file", "only http://"),
        ("script", ""),
        ("gopher", "only http://"),
        ("hostless", ""),
        ("credentials", "it has credentials"),
    ] {
        let refused = get(&fetcher, &format!("{outer}/{path}"), 8).unwrap_err().to_string();
        assert!(refused.starts_with("`127.0.0.1` leads to an address that cannot be fetched: "), "{path}: {refused}");
        assert!(refused.contains(why), "{path}: {refused}");
    }
    let turns = get(&fetcher, &format!("{outer}/loop"), 8).unwrap_err();
    assert!(turns.to_string().contains("3 redirects"), "{turns}");
    assert!(get(&fetcher, &format!("{outer}/nowhere"), 8).unwrap_err().to_string().contains("3 redirects"));
    // A host that is allowed by name has the same rule.
    let named = Fetcher::new(&FetchRules { hosts: vec!["127.0.0.1".into()], ..rules() }, None).unwrap();
    assert_eq!(get(&named, &outer, 8).as_deref(), Ok("open"));
    let refused = get(&named, &format!("{outer}/in"), 8).unwrap_err();
    assert!(refused.to_string().contains("`127.0.0.2`") && refused.to_string().contains("--allowed-media-domains"));
    assert_eq!(inside.load(Ordering::SeqCst), 0);
}

#[test]
fn public_addresses_and_no_others() {
    let public = ["1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1", "2606:4700::1111", "::ffff:8.8.8.8"];
    let private = [
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "100.64.0.1",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.168.1.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:10.0.0.1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "fe80::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2001::1",
        "::127.0.0.1",
        "64:ff9b:1::1",
        "100::1",
    ];
    for address in public {
        assert!(is_public(address.parse().unwrap()), "{address}");
    }
    for address in private {
        assert!(!is_public(address.parse().unwrap()), "{address}");
    }
}

#[test]
fn what_cannot_be_a_port_leads_nowhere() {
    for authority in ["a", "a:", "a:80", "[::1]", "[::1]:8080"] {
        assert!(parsed(&format!("http://{authority}/p")).is_ok(), "{authority}");
    }
    for authority in ["a:99999", "a:-1", "a:0", "[::1]:70000"] {
        let error = parsed(&format!("http://{authority}/p")).unwrap_err().to_string();
        assert!(error.contains("port") || error.contains("not an address"), "{authority}: {error}");
    }
}

#[test]
fn a_location_leads_where_its_words_say() {
    let base = parsed("https://a.example:8443/x/y?q=1").unwrap();
    for (location, expected) in [
        ("https://b.example/z", "https://b.example/z"),
        ("//b.example/z", "https://b.example/z"),
        ("/z?p", "https://a.example:8443/z?p"),
        ("z", "https://a.example:8443/x/z"),
        ("z/w:v", "https://a.example:8443/x/z/w:v"),
        ("?p=2", "https://a.example:8443/x/y?p=2"),
        ("", "https://a.example:8443/x/y"),
    ] {
        assert_eq!(led_to(&base, location).unwrap().to_string(), expected, "{location}");
    }
    assert!(led_to(&base, "FILE:///etc/passwd").unwrap_err().contains("only http://"));
    // A chain of redirects that was on TLS once never returns to plain text.
    let plain = led_to(&parsed("http://a.example").unwrap(), "https://b.example/").unwrap();
    assert!(led_to(&plain, "/here").is_ok());
    assert_eq!(led_to(&plain, "HTTP://b.example/"), Err("it leads from https to http"));
    assert_eq!((host_of("https://A.example:1/b").as_str(), host_of("nothing").as_str()), ("a.example", ""));
}
